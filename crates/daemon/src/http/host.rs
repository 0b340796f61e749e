//! Whom a request is addressed to: the field `Host`.
//!
//! A page of another site can make a browser ask this daemon, once that site's name leads to the daemon's address (DNS
//! rebinding). The browser then shows the answer to that page. Such a request names the other site, so the daemon
//! answers only to addresses, `localhost` and the names of `http.hosts`.

use std::net::{IpAddr, Ipv6Addr};

use hyper::header::{HOST, HeaderMap};

/// Names of this daemon, besides its addresses.
pub struct Hosts(Vec<String>);

impl Hosts {
    pub fn new(names: &[String]) -> Hosts {
        Hosts(names.to_vec())
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_localhost_and_configured_names_are_this_daemon_and_no_other_name_is() {
        let hosts = Hosts::new(&["ops.example.org".to_owned()]);
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
