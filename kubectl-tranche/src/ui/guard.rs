//! Which requests the server answers: pure.
//!
//! Everybody on the machine can connect to the page, but it shows what its user may see, so nobody else may read it. A request
//! must have
//!
//! - a Host header with a loopback address or `localhost`: a request of an Internet page whose name resolves to 127.0.0.1 (DNS
//!   rebinding) has that page's name in it;
//! - the secret: in the URL that the command prints, then in a cookie that scripts cannot read and other sites do not send;
//! - no other site as its initiator, where the browser names the initiator.

/// The secret of a run of the command, and its port.
#[derive(Clone)]
pub struct Guard {
    token: String,
    port: u16,
}

impl std::fmt::Debug for Guard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Guard")
            .field("port", &self.port)
            .finish_non_exhaustive()
    }
}

/// The parts of a request that decide whether it is answered.
#[derive(Clone, Copy, Debug, Default)]
pub struct Visitor<'a> {
    pub host: Option<&'a str>,
    pub cookie: Option<&'a str>,
    /// The query of the URL.
    pub query: Option<&'a str>,
    /// `Sec-Fetch-Site`: how the site of the page that made the request relates to this one.
    pub site: Option<&'a str>,
    /// `Sec-Fetch-Mode`: `navigate` where a person opened the page.
    pub mode: Option<&'a str>,
}

/// Why a request is not answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// The Host header has another name.
    #[error(
        "this page is served as 127.0.0.1 and localhost only: open the address that `kubectl tranche ui` printed"
    )]
    Host,
    /// Another site made the request.
    #[error(
        "this page does not answer other pages: open the address that `kubectl tranche ui` printed"
    )]
    Site,
    /// The secret is missing, or is that of an earlier run.
    #[error(
        "this page is for the one who started it: open the address that `kubectl tranche ui` printed, with its token"
    )]
    Token,
}

/// How an answered request gave the secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admitted {
    /// In the printed URL: the answer sets the cookie.
    ByUrl,
    /// In the cookie.
    ByCookie,
}

impl Guard {
    /// A guard with a secret and a port.
    #[must_use]
    pub fn new(token: String, port: u16) -> Self {
        Self { token, port }
    }

    /// The address for a person to open.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}/?token={}", self.port, self.token)
    }

    /// The value of `Set-Cookie`. Browsers give a cookie of one port to all ports of a host, so its name has the port.
    #[must_use]
    pub fn cookie(&self) -> String {
        format!(
            "{}={}; HttpOnly; SameSite=Strict; Path=/",
            self.cookie_name(),
            self.token
        )
    }

    fn cookie_name(&self) -> String {
        format!("tranche-ui-{}", self.port)
    }

    /// Admits a request, or says why it is refused.
    pub fn admit(&self, visitor: Visitor<'_>) -> Result<Admitted, Refused> {
        if !visitor.host.is_some_and(|host| self.is_ours(host)) {
            return Err(Refused::Host);
        }
        let by_url = visitor
            .query
            .into_iter()
            .flat_map(|query| query.split('&'))
            .filter_map(|pair| pair.strip_prefix("token="))
            .any(|token| self.is_token(token));
        if by_url {
            return Ok(Admitted::ByUrl);
        }
        let is_navigation = visitor.mode == Some("navigate");
        if !is_navigation && matches!(visitor.site, Some("cross-site" | "same-site")) {
            return Err(Refused::Site);
        }
        let name = self.cookie_name();
        let by_cookie = visitor
            .cookie
            .into_iter()
            .flat_map(|cookies| cookies.split(';'))
            .filter_map(|pair| pair.trim().split_once('='))
            .any(|(key, token)| key == name && self.is_token(token));
        if by_cookie {
            Ok(Admitted::ByCookie)
        } else {
            Err(Refused::Token)
        }
    }

    fn is_ours(&self, host: &str) -> bool {
        let port = host
            .strip_prefix("127.0.0.1:")
            .or_else(|| host.strip_prefix("localhost:"));
        port.and_then(|port| port.parse().ok()) == Some(self.port)
    }

    /// Compares in constant time.
    fn is_token(&self, token: &str) -> bool {
        let (ours, theirs) = (self.token.as_bytes(), token.as_bytes());
        let difference = ours.iter().zip(theirs).fold(0, |sum, (a, b)| sum | (a ^ b));
        ours.len() == theirs.len() && difference == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guard() -> Guard {
        Guard::new("secret".into(), 8080)
    }

    const HOME: Visitor<'static> = Visitor {
        host: Some("127.0.0.1:8080"),
        cookie: Some("a=b; tranche-ui-8080=secret"),
        query: None,
        site: Some("same-origin"),
        mode: Some("cors"),
    };

    #[test]
    fn the_printed_url_lets_in_and_its_cookie_afterwards() {
        let by_url = Visitor {
            query: Some("token=secret"),
            cookie: None,
            ..HOME
        };
        assert_eq!(guard().admit(by_url), Ok(Admitted::ByUrl));
        assert_eq!(guard().admit(HOME), Ok(Admitted::ByCookie));
        let by_name = Visitor {
            host: Some("localhost:8080"),
            ..HOME
        };
        assert_eq!(guard().admit(by_name), Ok(Admitted::ByCookie));
        assert!(
            guard()
                .cookie()
                .starts_with("tranche-ui-8080=secret; HttpOnly; SameSite=Strict")
        );
        assert!(guard().url().ends_with("/?token=secret"));
    }

    #[test]
    fn another_host_name_is_refused_even_with_the_secret() {
        for host in [
            None,
            Some("evil.example:8080"),
            Some("127.0.0.1"),
            Some("127.0.0.1:80"),
            Some("127.0.0.1:8080.evil"),
        ] {
            let visitor = Visitor {
                host,
                query: Some("token=secret"),
                ..HOME
            };
            assert_eq!(guard().admit(visitor), Err(Refused::Host), "{host:?}");
        }
    }

    #[test]
    fn without_the_secret_nobody_is_let_in() {
        for cookie in [
            None,
            Some(""),
            Some("tranche-ui-8080=Secret"),
            Some("tranche-ui-8080=secre"),
            Some("tranche-ui-8081=secret"),
            Some("tranche-ui-8080="),
        ] {
            let visitor = Visitor { cookie, ..HOME };
            assert_eq!(guard().admit(visitor), Err(Refused::Token), "{cookie:?}");
        }
        let query = Visitor {
            cookie: None,
            query: Some("token=secre&x=secret"),
            ..HOME
        };
        assert_eq!(guard().admit(query), Err(Refused::Token));
    }

    #[test]
    fn pages_of_other_ports_cannot_use_the_cookie_but_links_work() {
        for site in ["cross-site", "same-site"] {
            let visitor = Visitor {
                site: Some(site),
                ..HOME
            };
            assert_eq!(guard().admit(visitor), Err(Refused::Site));
            let link = Visitor {
                mode: Some("navigate"),
                ..visitor
            };
            assert_eq!(guard().admit(link), Ok(Admitted::ByCookie));
        }
    }
}
