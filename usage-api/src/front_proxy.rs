//! Whether a caller is the API server, and for whom it asks.
//!
//! The API server authenticates and authorizes a user, and forwards the request with the user in headers. A client certificate proves
//! that it is the API server. The ConfigMap `extension-apiserver-authentication` of `kube-system` has the authority that signs the
//! certificate, the names that it may have and the names of the headers. Nobody else can read usage here, whatever token they have.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use http::HeaderMap;
use k8s_openapi::api::authentication::v1::UserInfo;
use percent_encoding::percent_decode_str;
use rustls::RootCertStore;
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::ClientCertVerifier;
use x509_parser::parse_x509_certificate;

/// The namespace of the ConfigMap.
pub const NAMESPACE: &str = "kube-system";
/// The ConfigMap, which every API server with an aggregator keeps.
pub const NAME: &str = "extension-apiserver-authentication";

/// Why the ConfigMap cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TrustError {
    /// A key is missing: the API server has no aggregator.
    #[error(
        "ConfigMap {NAMESPACE}/{NAME} has no {0}: start the API server with --requestheader-client-ca-file, as kubeadm does"
    )]
    Missing(&'static str),
    /// A value is not what it should be.
    #[error("ConfigMap {NAMESPACE}/{NAME}: {key}: {problem}")]
    Invalid { key: &'static str, problem: String },
}

/// Why a caller is not believed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Rejected {
    /// It shows no certificate.
    #[error("only the API server may ask: read this API through it, with kubectl")]
    NoCertificate,
    /// The authority did not sign its certificate, or it has expired, or is not for clients.
    #[error("the client certificate is not one of the API server's aggregator: {0}")]
    Untrusted(String),
    /// The certificate's name is not one of those that are allowed.
    #[error("the client certificate's common name {0:?} is not among requestheader-allowed-names")]
    Name(String),
    /// The request names no user.
    #[error("the request names no user")]
    NoUser,
}

/// Who the API server is, and in which headers it names users.
pub struct Trust {
    verifier: Arc<dyn ClientCertVerifier>,
    /// Common names; empty for any.
    names: Vec<String>,
    user: Vec<String>,
    uid: Vec<String>,
    group: Vec<String>,
    extra: Vec<String>,
}

impl fmt::Debug for Trust {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Trust")
            .field("names", &self.names)
            .finish_non_exhaustive()
    }
}

impl Trust {
    /// Reads the ConfigMap's data.
    pub fn new(data: &BTreeMap<String, String>) -> Result<Self, TrustError> {
        let authority = "requestheader-client-ca-file";
        let invalid = |problem: String| TrustError::Invalid {
            key: authority,
            problem,
        };
        let pem = data.get(authority).ok_or(TrustError::Missing(authority))?;
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_slice_iter(pem.as_bytes()) {
            let certificate = certificate.map_err(|error| invalid(error.to_string()))?;
            roots
                .add(certificate)
                .map_err(|error| invalid(error.to_string()))?;
        }
        let provider = Arc::new(ring::default_provider());
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider)
            .build()
            .map_err(|error| invalid(error.to_string()))?;
        let user = list(data, "requestheader-username-headers")?;
        if user.is_empty() {
            return Err(TrustError::Missing("requestheader-username-headers"));
        }
        // The API server always writes the key. Its absence does not mean that every name is allowed.
        let allowed = "requestheader-allowed-names";
        if !data.contains_key(allowed) {
            return Err(TrustError::Missing(allowed));
        }
        let names = list(data, allowed)?;
        let lower = |names: Vec<String>| {
            names
                .into_iter()
                .map(|it| it.to_ascii_lowercase())
                .collect()
        };
        Ok(Self {
            verifier,
            names,
            user: lower(user),
            uid: lower(list(data, "requestheader-uid-headers")?),
            group: lower(list(data, "requestheader-group-headers")?),
            extra: lower(list(data, "requestheader-extra-headers-prefix")?),
        })
    }

    /// The user for whom the API server asks. `certificates` are the caller's, its own first; the TLS session has proved that it has the key.
    pub fn user(
        &self,
        certificates: &[CertificateDer<'_>],
        headers: &HeaderMap,
        now: UnixTime,
    ) -> Result<UserInfo, Rejected> {
        let (own, others) = certificates.split_first().ok_or(Rejected::NoCertificate)?;
        self.verifier
            .verify_client_cert(own, others, now)
            .map_err(|error| Rejected::Untrusted(error.to_string()))?;
        if !self.names.is_empty() {
            let name = common_name(own).unwrap_or_default();
            if !self.names.contains(&name) {
                return Err(Rejected::Name(name));
            }
        }
        let name = values(&self.user, headers).next().ok_or(Rejected::NoUser)?;
        Ok(UserInfo {
            username: Some(name),
            uid: values(&self.uid, headers).next(),
            groups: Some(values(&self.group, headers).collect()),
            extra: self.extras(headers),
        })
    }

    /// What else the API server knows of the user, by key. Keys are in lower case and escaped in headers.
    fn extras(&self, headers: &HeaderMap) -> Option<BTreeMap<String, Vec<String>>> {
        let mut all = BTreeMap::<String, Vec<String>>::new();
        for (name, value) in headers {
            let key = self
                .extra
                .iter()
                .find_map(|prefix| name.as_str().strip_prefix(prefix.as_str()));
            if let (Some(key), Ok(value)) = (key, value.to_str()) {
                let key = percent_decode_str(key).decode_utf8_lossy().into_owned();
                all.entry(key).or_default().push(value.to_owned());
            }
        }
        (!all.is_empty()).then_some(all)
    }
}

/// The values of the first of these headers that has some.
fn values(names: &[String], headers: &HeaderMap) -> std::vec::IntoIter<String> {
    let of = |name: &String| -> Vec<String> {
        let values = headers.get_all(name.as_str()).iter();
        let texts = values.filter_map(|value| Some(value.to_str().ok()?.to_owned()));
        texts.filter(|text| !text.is_empty()).collect()
    };
    let found = names.iter().map(of).find(|values| !values.is_empty());
    found.unwrap_or_default().into_iter()
}

/// A value that is a JSON list; empty if the key is missing.
fn list(data: &BTreeMap<String, String>, key: &'static str) -> Result<Vec<String>, TrustError> {
    let Some(text) = data.get(key) else {
        return Ok(Vec::new());
    };
    serde_json::from_str(text).map_err(|error| TrustError::Invalid {
        key,
        problem: error.to_string(),
    })
}

fn common_name(certificate: &[u8]) -> Option<String> {
    let (_, certificate) = parse_x509_certificate(certificate).ok()?;
    let name = certificate.subject().iter_common_name().next()?;
    Some(name.as_str().ok()?.to_owned())
}

#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
