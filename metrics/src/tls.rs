//! TLS with a self-signed certificate.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use rustls::ServerConfig;
use rustls::crypto::ring;
use rustls::pki_types::PrivatePkcs8KeyDer;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinHandle;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tracing::{debug, warn};

/// The time limit of a handshake.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// The most concurrent handshakes; the kernel queues further clients.
const AT_ONCE: usize = 32;
/// The pause after a failed accept: the process may lack descriptors.
const PAUSE: Duration = Duration::from_millis(200);

/// Why TLS could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// The certificate could not be made.
    #[error("cannot make a certificate: {0}")]
    Certificate(#[from] rcgen::Error),
    /// The certificate is not accepted.
    #[error("cannot use the certificate: {0}")]
    Config(#[from] rustls::Error),
}

/// Listens for TLS connections. Handshakes run concurrently: a silent client does not block others.
#[derive(Debug)]
pub struct TlsListener {
    address: std::io::Result<SocketAddr>,
    streams: mpsc::Receiver<(TlsStream<TcpStream>, SocketAddr)>,
    task: JoinHandle<()>,
}

impl TlsListener {
    /// Accepts on `listener`, with a new certificate.
    pub fn new(listener: TcpListener) -> Result<Self, TlsError> {
        let acceptor = TlsAcceptor::from(Arc::new(config()?));
        let (ready, streams) = mpsc::channel(1);
        let address = listener.local_addr();
        let task = tokio::spawn(accept(listener, acceptor, ready));
        Ok(Self {
            address,
            streams,
            task,
        })
    }
}

impl Drop for TlsListener {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn accept(
    listener: TcpListener,
    acceptor: TlsAcceptor,
    ready: mpsc::Sender<(TlsStream<TcpStream>, SocketAddr)>,
) {
    let turns = Arc::new(Semaphore::new(AT_ONCE));
    loop {
        // The semaphore is never closed.
        let Ok(turn) = Arc::clone(&turns).acquire_owned().await else {
            return;
        };
        let (stream, peer) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                warn!(%error, "cannot accept a connection for metrics");
                tokio::time::sleep(PAUSE).await;
                continue;
            }
        };
        let (acceptor, ready) = (acceptor.clone(), ready.clone());
        tokio::spawn(async move {
            let _turn = turn;
            match tokio::time::timeout(HANDSHAKE, acceptor.accept(stream)).await {
                // The receiver is gone when the server has ended.
                Ok(Ok(stream)) => drop(ready.send((stream, peer)).await),
                Ok(Err(error)) => debug!(%peer, %error, "no TLS"),
                Err(_) => debug!(%peer, "no TLS in time"),
            }
        });
    }
}

impl axum::serve::Listener for TlsListener {
    type Io = TlsStream<TcpStream>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        match self.streams.recv().await {
            Some(accepted) => accepted,
            // The accepting task lives as long as this.
            None => std::future::pending().await,
        }
    }

    fn local_addr(&self) -> std::io::Result<SocketAddr> {
        match &self.address {
            Ok(address) => Ok(*address),
            Err(error) => Err(error.kind().into()),
        }
    }
}

fn config() -> Result<ServerConfig, TlsError> {
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()])?;
    let key = PrivatePkcs8KeyDer::from(made.signing_key.serialize_der());
    let provider = Arc::new(ring::default_provider());
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_no_client_auth()
        .with_single_cert(vec![made.cert.der().clone()], key.into())?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(config)
}
