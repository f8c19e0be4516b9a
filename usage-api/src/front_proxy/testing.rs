//! Authorities and certificates that they sign.

use std::collections::BTreeMap;

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyPair,
};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use serde_json::json;

pub struct Authority(CertifiedIssuer<'static, KeyPair>);

/// A client's certificate and its key.
pub struct Identity {
    pub chain: Vec<CertificateDer<'static>>,
    pub key: PrivateKeyDer<'static>,
}

impl Authority {
    pub fn new() -> Self {
        let mut params = CertificateParams::default();
        params
            .distinguished_name
            .push(DnType::CommonName, "front-proxy-ca");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        Self(CertifiedIssuer::self_signed(params, key).unwrap())
    }

    /// A certificate for a client, or for a server, of this name.
    pub fn sign(&self, name: &str, client: bool) -> Identity {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        params.extended_key_usages = vec![if client {
            ExtendedKeyUsagePurpose::ClientAuth
        } else {
            ExtendedKeyUsagePurpose::ServerAuth
        }];
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.0).unwrap();
        Identity {
            chain: vec![certificate.der().clone()],
            key: PrivatePkcs8KeyDer::from(key.serialize_der()).into(),
        }
    }

    /// The ConfigMap's data of an API server that uses this authority, as kubeadm starts it.
    pub fn config_map(&self) -> BTreeMap<String, String> {
        let list = |value: &str| json!([value]).to_string();
        [
            ("client-ca-file", Self::new().0.pem()),
            ("requestheader-client-ca-file", self.0.pem()),
            ("requestheader-allowed-names", list("front-proxy-client")),
            ("requestheader-username-headers", list("X-Remote-User")),
            ("requestheader-uid-headers", list("X-Remote-Uid")),
            ("requestheader-group-headers", list("X-Remote-Group")),
            (
                "requestheader-extra-headers-prefix",
                list("X-Remote-Extra-"),
            ),
        ]
        .map(|(key, value)| (key.to_owned(), value))
        .into()
    }
}
