//! TLS with a self-signed certificate, and with clients' certificates if the server asks for them.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::connect_info::Connected;
use axum::serve::IncomingStream;
use rustls::client::danger::HandshakeSignatureValid;
use rustls::crypto::{
    WebPkiSupportedAlgorithms, ring, verify_tls12_signature, verify_tls13_signature,
};
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{DigitallySignedStruct, DistinguishedName, ServerConfig, SignatureScheme};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinHandle;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tracing::{debug, warn};

use crate::connections::{Bounded, Connections};

/// How long a client may say nothing at all.
const FIRST_BYTE: Duration = Duration::from_secs(1);
/// The time limit of a handshake.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// The most concurrent handshakes.
const AT_ONCE: usize = 32;
/// The pause after a failed accept: the process may lack descriptors.
const PAUSE: Duration = Duration::from_millis(200);

/// Why TLS could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// The certificate could not be created.
    #[error("cannot make a certificate: {0}")]
    Certificate(#[from] rcgen::Error),
    /// The certificate is not accepted.
    #[error("cannot use the certificate: {0}")]
    Config(#[from] rustls::Error),
}

/// A connection.
type Stream = Bounded<TlsStream<TcpStream>>;

/// Listens for TLS connections. Handshakes run concurrently: a silent client does not block others.
#[derive(Debug)]
pub struct TlsListener {
    address: std::io::Result<SocketAddr>,
    streams: mpsc::Receiver<(Stream, SocketAddr)>,
    task: JoinHandle<()>,
}

impl TlsListener {
    /// Accepts on `listener`, with a new certificate.
    pub fn new(listener: TcpListener) -> Result<Self, TlsError> {
        Self::start(listener, false)
    }

    /// The same, but asks clients for a certificate, which [`Peer`] has. A client that shows one has only proved that
    /// it has the key: the server decides request by request whether it trusts the certificate.
    pub fn with_client_certificates(listener: TcpListener) -> Result<Self, TlsError> {
        Self::start(listener, true)
    }

    fn start(listener: TcpListener, ask: bool) -> Result<Self, TlsError> {
        let acceptor = TlsAcceptor::from(Arc::new(config(ask)?));
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
    ready: mpsc::Sender<(Stream, SocketAddr)>,
) {
    let turns = Arc::new(Semaphore::new(AT_ONCE));
    let connections = Connections::default();
    loop {
        let (stream, peer) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                warn!(%error, "cannot accept a connection");
                tokio::time::sleep(PAUSE).await;
                continue;
            }
        };
        let Some(permit) = connections.enter(peer.ip()) else {
            debug!(%peer, "too many connections");
            continue;
        };
        let (acceptor, ready) = (acceptor.clone(), ready.clone());
        let turns = Arc::clone(&turns);
        tokio::spawn(async move {
            // Who says nothing takes no turn.
            let first = tokio::time::timeout(FIRST_BYTE, stream.readable()).await;
            if !matches!(first, Ok(Ok(()))) {
                return debug!(%peer, "no byte in time");
            }
            let shaken = {
                // The semaphores are never closed.
                let _own = permit.turn().await;
                let _turn = turns.acquire().await;
                tokio::time::timeout(HANDSHAKE, acceptor.accept(stream)).await
            };
            match shaken {
                // The receiver is gone when the server has ended.
                Ok(Ok(stream)) => drop(ready.send((Bounded::new(stream, permit), peer)).await),
                Ok(Err(error)) => debug!(%peer, %error, "no TLS"),
                Err(_) => debug!(%peer, "no TLS in time"),
            }
        });
    }
}

impl axum::serve::Listener for TlsListener {
    type Io = Stream;
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

/// The other end of a connection.
#[derive(Clone, Debug, Default)]
pub struct Peer {
    /// The certificates that it showed, its own first.
    pub certificates: Arc<[CertificateDer<'static>]>,
}

impl Connected<IncomingStream<'_, TlsListener>> for Peer {
    fn connect_info(stream: IncomingStream<'_, TlsListener>) -> Self {
        let (_, session) = stream.io().get_ref().get_ref();
        let certificates = session.peer_certificates().unwrap_or_default();
        Self {
            certificates: certificates
                .iter()
                .map(|it| it.clone().into_owned())
                .collect(),
        }
    }
}

/// Asks for a certificate, and accepts every client that shows none or has the key of the one that it shows.
#[derive(Debug)]
struct AnyClient(WebPkiSupportedAlgorithms);

impl ClientCertVerifier for AnyClient {
    fn client_auth_mandatory(&self) -> bool {
        false
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        Ok(ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, certificate, signed, &self.0)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, certificate, signed, &self.0)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_schemes()
    }
}

fn config(ask: bool) -> Result<ServerConfig, TlsError> {
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()])?;
    let key = PrivatePkcs8KeyDer::from(made.signing_key.serialize_der());
    let provider = ring::default_provider();
    let clients = AnyClient(provider.signature_verification_algorithms);
    let builder = ServerConfig::builder_with_provider(Arc::new(provider))
        .with_safe_default_protocol_versions()?;
    let builder = if ask {
        builder.with_client_cert_verifier(Arc::new(clients))
    } else {
        builder.with_no_client_auth()
    };
    let mut config = builder.with_single_cert(vec![made.cert.der().clone()], key.into())?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(config)
}
