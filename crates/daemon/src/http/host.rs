//! Whom a request is addressed to: the field `Host`.
//!
//! A page of another site can make a browser ask this daemon, once that site's name leads to the daemon's address (DNS
//! rebinding). The browser then shows the answer to that page. Such a request names the other site, so the daemon
//! answers only to addresses, `localhost` and the names of `http.hosts`.

use std::net::{Ipv4Addr, Ipv6Addr};

use forebay_core::{Error, Result};
use hyper::header::{HOST, HeaderMap};

/// Of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Meant {
    ThisDaemon,
    AnotherHost,
    /// More than one `Host`: whoever forwarded the request may have gone by another than this daemon would.
    Ambiguous,
}

/// Names of this daemon, besides its addresses.
pub struct Hosts(Vec<String>);

impl Hosts {
    /// Errors with what no request can name.
    pub fn new(names: &[String]) -> Result<Hosts> {
        match names.iter().find(|name| !is_name(name)) {
            None => Ok(Hosts(names.to_vec())),
            Some(name) => Err(Error::invalid("`http.hosts` must be a list of host names")
                .with("name", name)
                .hint("give names as `ops.example.org`, without scheme, port, wildcard or a dot at the end")),
        }
    }

    pub(super) fn meant(&self, headers: &HeaderMap) -> Meant {
        let mut hosts = headers.get_all(HOST).iter();
        let host = hosts.next().and_then(|host| host.to_str().ok());
        match (hosts.next(), host.is_some_and(|host| self.have(host))) {
            (Some(_), _) => Meant::Ambiguous,
            (None, true) => Meant::ThisDaemon,
            (None, false) => Meant::AnotherHost,
        }
    }

    /// `host` may have a port, and a name a dot at its end.
    fn have(&self, host: &str) -> bool {
        if let Some((address, port)) = host.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
            return address.parse::<Ipv6Addr>().is_ok()
                && (port.is_empty() || port.strip_prefix(':').is_some_and(is_port));
        }
        let (name, port) = host.split_once(':').unwrap_or((host, ""));
        let absolute = name.strip_suffix('.').unwrap_or(name);
        let is_same = |other: &str| other.eq_ignore_ascii_case(absolute);
        let is_ours = name.parse::<Ipv4Addr>().is_ok() || is_same("localhost") || self.0.iter().any(|it| is_same(it));
        is_ours && is_port(port)
    }
}

/// The port may be left out behind the colon, as URLs have it.
fn is_port(port: &str) -> bool {
    port.bytes().all(|byte| byte.is_ascii_digit())
}

fn is_name(name: &str) -> bool {
    let is_label = |label: &str| {
        !label.is_empty() && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_'))
    };
    name.split('.').all(is_label)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_no_request_can_name_is_refused() {
        let refused = |name: &str| Hosts::new(&[name.to_owned()]).err().and_then(|error| error.hint_text().map(drop));
        for name in ["", "ops:80", "*", "[::1]", "ops.example.", ".ops", "a b", "\u{e9}vil", "https://ops"] {
            assert!(refused(name).is_some(), "{name}");
        }
        for name in ["ops", "Ops-1.example.org", "gpu_07", "10.0.0.7"] {
            assert!(refused(name).is_none(), "{name}");
        }
    }

    #[test]
    fn addresses_localhost_and_configured_names_are_this_daemon_and_no_other_name_is() {
        let hosts = Hosts::new(&["ops.example.org".to_owned()]).unwrap();
        let ours =
            ["127.0.0.1", "10.0.0.7:9477", "[::1]:9477", "[::1]", "localhost", "LocalHost:80", "Ops.Example.org:8"];
        let others =
            ["", "evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "[evil.example]:80", ":80"];
        let malformed = [
            "localhost:80@evil.com",
            "localhost@evil.com",
            "127.0.0.1:80:80",
            "localhost:abc",
            "[::1]:abc",
            "[::1]:80]",
            "localhost..",
            "127.0.0.1.",
            ".",
        ];
        for host in ours.into_iter().chain(["localhost.", "ops.example.org.:8", "localhost:"]) {
            assert!(hosts.have(host), "{host}");
        }
        for host in others.into_iter().chain(malformed).chain(["[::1]evil", "example.org"]) {
            assert!(!hosts.have(host), "{host}");
        }
    }
}
