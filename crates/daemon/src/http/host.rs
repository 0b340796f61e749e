//! Whom a request is addressed to: the field `Host`.
//!
//! A page of another site can make a browser ask this daemon, once that site's name leads to the daemon's address (DNS
//! rebinding). The browser then shows the answer to that page. Such a request names the other site, so the daemon
//! answers only to addresses, `localhost` and the names of `http.hosts`.

use std::net::{IpAddr, Ipv6Addr};

use forebay_core::{Error, Result};
use hyper::header::{HOST, HeaderMap};

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

    pub(super) fn are_meant(&self, headers: &HeaderMap) -> bool {
        let host = headers.get(HOST).and_then(|host| host.to_str().ok());
        host.is_some_and(|host| self.have(host))
    }

    /// `host` may have a port.
    fn have(&self, host: &str) -> bool {
        if let Some((address, port)) = host.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
            return address.parse::<Ipv6Addr>().is_ok() && (port.is_empty() || port.starts_with(':'));
        }
        let name = host.split_once(':').map_or(host, |(name, _)| name);
        let is_same = |other: &str| other.eq_ignore_ascii_case(name);
        name.parse::<IpAddr>().is_ok() || is_same("localhost") || self.0.iter().any(|other| is_same(other))
    }
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
        for host in ours {
            assert!(hosts.have(host), "{host}");
        }
        for host in others.into_iter().chain(["[::1]evil", "ops.example.org.", "example.org"]) {
            assert!(!hosts.have(host), "{host}");
        }
    }
}
