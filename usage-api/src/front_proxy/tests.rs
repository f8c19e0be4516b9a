use std::time::Duration;

use http::{HeaderMap, HeaderName, HeaderValue};
use rustls::pki_types::UnixTime;

use super::testing::{Authority, Identity};
use super::*;

fn headers(pairs: &[(&str, &'static str)]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for (name, value) in pairs {
        let name = HeaderName::from_bytes(name.as_bytes()).unwrap();
        headers.append(name, HeaderValue::from_static(value));
    }
    headers
}

fn ask(trust: &Trust, identity: &Identity) -> Result<UserInfo, Rejected> {
    trust.user(
        &identity.chain,
        &headers(&[("X-Remote-User", "jane")]),
        UnixTime::now(),
    )
}

#[test]
fn the_api_server_says_for_whom_it_asks() {
    let authority = Authority::new();
    let trust = Trust::new(&authority.config_map()).unwrap();
    let caller = authority.sign("front-proxy-client", true);
    let headers = headers(&[
        ("X-Remote-User", "jane"),
        ("X-Remote-Uid", "7"),
        ("X-Remote-Group", "team"),
        ("X-Remote-Group", "system:authenticated"),
        (
            "X-Remote-Extra-authentication.kubernetes.io%2Fpod-name",
            "p",
        ),
        ("X-Remote-Extra-scopes", "a"),
        ("X-Remote-Extra-scopes", "b"),
        ("Authorization", "Bearer of-somebody-else"),
    ]);
    let user = trust
        .user(&caller.chain, &headers, UnixTime::now())
        .unwrap();
    assert_eq!(
        (user.username.as_deref(), user.uid.as_deref()),
        (Some("jane"), Some("7"))
    );
    assert_eq!(user.groups.unwrap(), ["team", "system:authenticated"]);
    let extra = user.extra.unwrap();
    assert_eq!(extra["authentication.kubernetes.io/pod-name"], ["p"]);
    assert_eq!(extra["scopes"], ["a", "b"]);
    assert_eq!(extra.len(), 2);
}

#[test]
fn nobody_else_is_believed() {
    let authority = Authority::new();
    let trust = Trust::new(&authority.config_map()).unwrap();
    ask(&trust, &authority.sign("front-proxy-client", true)).unwrap();

    let nobody = Identity {
        chain: Vec::new(),
        key: authority.sign("x", true).key,
    };
    assert_eq!(ask(&trust, &nobody), Err(Rejected::NoCertificate));
    let other = ask(&trust, &authority.sign("system:node:a", true));
    assert_eq!(other, Err(Rejected::Name("system:node:a".into())));
    for (why, identity) in [
        (
            "another authority",
            Authority::new().sign("front-proxy-client", true),
        ),
        (
            "a server's certificate",
            authority.sign("front-proxy-client", false),
        ),
    ] {
        assert!(
            matches!(ask(&trust, &identity), Err(Rejected::Untrusted(_))),
            "{why}"
        );
    }
    let caller = authority.sign("front-proxy-client", true);
    let late = UnixTime::since_unix_epoch(Duration::from_secs(100_000_000_000));
    let jane = headers(&[("X-Remote-User", "jane")]);
    let expired = trust.user(&caller.chain, &jane, late);
    assert!(
        matches!(expired, Err(Rejected::Untrusted(_))),
        "{expired:?}"
    );
    for none in [headers(&[]), headers(&[("X-Remote-User", "")])] {
        let answer = trust.user(&caller.chain, &none, UnixTime::now());
        assert_eq!(answer, Err(Rejected::NoUser));
    }
}

#[test]
fn without_allowed_names_the_authority_decides() {
    let authority = Authority::new();
    let mut data = authority.config_map();
    data.insert("requestheader-allowed-names".into(), "[]".into());
    let trust = Trust::new(&data).unwrap();
    ask(&trust, &authority.sign("aggregator", true)).unwrap();
    ask(&trust, &Authority::new().sign("aggregator", true)).unwrap_err();
}

#[test]
fn a_config_map_without_the_authority_or_the_headers_is_refused() {
    let good = Authority::new().config_map();
    for (key, value, expected) in [
        (
            "requestheader-client-ca-file",
            None,
            "--requestheader-client-ca-file",
        ),
        (
            "requestheader-client-ca-file",
            Some(""),
            "requestheader-client-ca-file",
        ),
        (
            "requestheader-client-ca-file",
            Some("-----BEGIN CERTIFICATE-----\nAA==\n-----END CERTIFICATE-----\n"),
            "requestheader-client-ca-file",
        ),
        (
            "requestheader-allowed-names",
            None,
            "requestheader-allowed-names",
        ),
        (
            "requestheader-allowed-names",
            Some("front-proxy-client"),
            "requestheader-allowed-names",
        ),
        (
            "requestheader-username-headers",
            Some("[]"),
            "requestheader-username-headers",
        ),
    ] {
        let mut data = good.clone();
        match value {
            Some(value) => data.insert(key.into(), value.into()),
            None => data.remove(key),
        };
        let error = Trust::new(&data).unwrap_err().to_string();
        assert!(error.contains(expected), "{key}={value:?}: {error}");
    }
}
