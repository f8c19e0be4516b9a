//! Listens for clients of both families of addresses.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};

use tokio::net::TcpListener;

/// The error of a kernel without IPv6 (`EAFNOSUPPORT`).
const NO_SUCH_FAMILY: i32 = 97;

/// Listens on an endpoint. `[::]` takes clients of both families; on a kernel without IPv6 it is `0.0.0.0`.
pub async fn listen(endpoint: SocketAddr) -> io::Result<TcpListener> {
    match TcpListener::bind(endpoint).await {
        Err(error)
            if error.raw_os_error() == Some(NO_SUCH_FAMILY) && endpoint.ip().is_unspecified() =>
        {
            TcpListener::bind((Ipv4Addr::UNSPECIFIED, endpoint.port())).await
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_client_with_an_ipv4_address_reaches_the_default_endpoint() {
        let listener = listen("[::]:0".parse().unwrap()).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let client = tokio::net::TcpStream::connect((Ipv4Addr::LOCALHOST, port));
        let (client, accepted) = tokio::join!(client, listener.accept());
        let (client, (_, peer)) = (client.unwrap(), accepted.unwrap());
        assert_eq!(peer.ip().to_canonical(), client.local_addr().unwrap().ip());
    }
}
