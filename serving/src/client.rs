//! Reads from another process's [`serve`](crate::server::serve): a GET over TLS with a bearer token. The certificate is
//! not verified, because it is self-signed: send no token that is valid for anything else
//! ([`AUDIENCE`](crate::access::AUDIENCE)).

use std::net::SocketAddr;
use std::sync::Arc;

use axum::body::Body;
use axum::body::Bytes;
use axum::http::header::{AUTHORIZATION, HOST};
use axum::http::{HeaderValue, Request, StatusCode};
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{
    WebPkiSupportedAlgorithms, ring, verify_tls12_signature, verify_tls13_signature,
};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, Error, SignatureScheme};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

/// Why nothing could be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// No connection.
    #[error("connect: {0}")]
    Connect(#[source] std::io::Error),
    /// No TLS.
    #[error("TLS: {0}")]
    Tls(#[source] std::io::Error),
    /// The token cannot be a header's value.
    #[error("the token has characters that no token has")]
    Token,
    /// No HTTP, or the connection ended.
    #[error("HTTP: {0}")]
    Http(#[source] hyper::Error),
    /// The answer ended early.
    #[error("the answer: {0}")]
    Body(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The answer is longer than the limit.
    #[error("the answer has more than {limit} bytes")]
    TooLong {
        /// The limit, in bytes.
        limit: usize,
    },
}

/// A client that accepts any certificate.
#[derive(Clone)]
pub struct Client(TlsConnector);

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Client")
    }
}

impl Client {
    /// A client without a certificate of its own.
    pub fn new() -> Result<Self, Error> {
        Self::with_certificate(None)
    }

    /// A client that shows these certificates, its own first, and has the key of the first.
    pub fn with_certificate(
        own: Option<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>)>,
    ) -> Result<Self, Error> {
        let provider = ring::default_provider();
        let verifier = AnyCertificate(provider.signature_verification_algorithms);
        let builder = ClientConfig::builder_with_provider(Arc::new(provider))
            .with_safe_default_protocol_versions()?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(verifier));
        let config = match own {
            Some((chain, key)) => builder.with_client_auth_cert(chain, key)?,
            None => builder.with_no_client_auth(),
        };
        Ok(Self(TlsConnector::from(Arc::new(config))))
    }

    /// Status and body of a GET of `path`, of at most `limit` bytes. It has no deadline.
    pub async fn get(
        &self,
        address: SocketAddr,
        path: &str,
        token: Option<&str>,
        limit: usize,
    ) -> Result<(StatusCode, Bytes), ReadError> {
        let stream = TcpStream::connect(address)
            .await
            .map_err(ReadError::Connect)?;
        let mut request = Request::new(Body::empty());
        *request.uri_mut() = path.parse().unwrap_or_default();
        if let Some(token) = token {
            let mut value =
                HeaderValue::try_from(format!("Bearer {token}")).map_err(|_| ReadError::Token)?;
            value.set_sensitive(true);
            request.headers_mut().insert(AUTHORIZATION, value);
        }
        self.send(stream, request, limit).await
    }

    /// Status and body of the answer to a request, which is sent on its own connection.
    pub async fn send(
        &self,
        stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
        mut request: Request<Body>,
        limit: usize,
    ) -> Result<(StatusCode, Bytes), ReadError> {
        let name = ServerName::IpAddress(std::net::Ipv4Addr::LOCALHOST.into());
        let stream = self.0.connect(name, stream).await.map_err(ReadError::Tls)?;
        let headers = request.headers_mut();
        headers.insert(HOST, HeaderValue::from_static("localhost"));
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream))
            .await
            .map_err(ReadError::Http)?;
        let exchange = async {
            let answer = sender
                .send_request(request)
                .await
                .map_err(ReadError::Http)?;
            let status = answer.status();
            let body = Limited::new(answer.into_body(), limit)
                .collect()
                .await
                .map_err(|error| {
                    if error.is::<LengthLimitError>() {
                        ReadError::TooLong { limit }
                    } else {
                        ReadError::Body(error)
                    }
                })?;
            Ok((status, body.to_bytes()))
        };
        tokio::pin!(exchange);
        tokio::select! {
            biased;
            done = &mut exchange => done,
            // The exchange can still use what the connection read before it ended.
            _ = connection => exchange.await,
        }
    }
}

#[derive(Debug)]
struct AnyCertificate(WebPkiSupportedAlgorithms);

impl ServerCertVerifier for AnyCertificate {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, certificate, signed, &self.0)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, certificate, signed, &self.0)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_schemes()
    }
}
