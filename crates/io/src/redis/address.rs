//! Addresses of servers: the URLs of the configuration, and the addresses that clusters and sentinels report.
//!
//! `redis://[user[:password]@]host[:port][/db]`, `rediss://` for TLS, `unix:///path[?db=n]`. A host may be a name, an
//! IPv4 or, in brackets, an IPv6 address; user and password may contain `%xx`. All errors in a URL are found here,
//! and no message repeats a password.

use std::fmt;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::path::PathBuf;

use forebay_core::{Error, Result};

use crate::secret_file::SecretFile;

const DEFAULT_PORT: u16 = 6379;

/// What a URL can be, for people.
pub(super) const FORMS: &str =
    "write `redis://[user[:password]@]host:6379[/db]`, `rediss://…` for TLS, or `unix:///path`";

/// What is printed in the place of a password.
pub const MASK: &str = "***";

#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Address {
    Tcp { host: String, port: u16 },
    Unix(PathBuf),
}

impl Address {
    /// `host:port` as a cluster writes it: without brackets around IPv6, and perhaps without a host, which then is
    /// the reporting server's. A server that knows no host writes `?`: it tells nothing.
    pub fn told(text: &str, teller: &Address) -> Option<Address> {
        let (host, port) = text.rsplit_once(':')?;
        Address::of_node(host, port.parse().ok()?, teller)
    }

    /// The same for separate host and port.
    pub fn of_node(host: &str, port: u16, teller: &Address) -> Option<Address> {
        let host = match (host, teller) {
            ("", Address::Tcp { host, .. }) => host.clone(),
            ("", Address::Unix(_)) | ("?", _) => return None,
            (host, _) => host.to_string(),
        };
        Some(Address::Tcp { host, port })
    }

    /// The socket address, if no name server is needed.
    pub fn literal(&self) -> Option<SocketAddr> {
        match self {
            Address::Tcp { host, port } => Some(SocketAddr::new(host.parse::<IpAddr>().ok()?, *port)),
            Address::Unix(_) => None,
        }
    }

    /// Asks the name server, and blocks for the answer.
    pub fn resolve(host: &str, port: u16) -> std::io::Result<Vec<SocketAddr>> {
        let found: Vec<_> = (host, port).to_socket_addrs()?.collect();
        if found.is_empty() { Err(std::io::Error::other("the name has no address")) } else { Ok(found) }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Tcp { host, port } if host.contains(':') => write!(f, "[{host}]:{port}"),
            Address::Tcp { host, port } => write!(f, "{host}:{port}"),
            Address::Unix(path) => write!(f, "{}", path.display()),
        }
    }
}

/// Credentials for a server.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Credentials {
    /// None for the server's default user.
    pub user: Option<String>,
    /// None for a server that requires none.
    pub password: Option<Password>,
}

/// A password, or where it stands.
#[derive(Clone, PartialEq, Eq)]
pub enum Password {
    /// The password itself; never printed.
    Text(String),
    /// It is read again after a connection has failed, if it was replaced.
    File(SecretFile),
}

impl Password {
    pub(super) fn file(&self) -> Option<PathBuf> {
        match self {
            Password::Text(_) => None,
            Password::File(file) => Some(file.path().to_owned()),
        }
    }

    pub(super) fn read(&self) -> Result<String> {
        match self {
            Password::Text(text) => Ok(text.clone()),
            Password::File(file) => file.read(),
        }
    }
}

impl From<&str> for Password {
    fn from(text: &str) -> Password {
        Password::Text(text.to_owned())
    }
}

/// Never printed.
impl fmt::Debug for Password {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Password::Text(_) => f.write_str(MASK),
            Password::File(file) => file.fmt(f),
        }
    }
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Url {
    pub address: Address,
    pub is_tls: bool,
    pub credentials: Credentials,
    pub database: u32,
}

impl Url {
    pub fn parse(text: &str) -> Result<Url> {
        Url::read(text).map_err(|why| {
            Error::invalid(format!("cannot read a redis url: {why}")).with("url", without_password(text)).hint(FORMS)
        })
    }

    /// Or why it is none.
    pub fn read(text: &str) -> Result<Url, &'static str> {
        let (scheme, rest) = text.split_once("://").ok_or("it has no scheme")?;
        match scheme {
            "unix" => Url::unix(rest),
            "redis" | "rediss" => Url::tcp(rest, scheme == "rediss"),
            _ => Err("its scheme is not `redis`, `rediss` or `unix`"),
        }
    }

    fn unix(rest: &str) -> Result<Url, &'static str> {
        let (credentials, path) = split_credentials(rest)?;
        let (path, database) = match path.split_once('?') {
            Some((path, query)) => {
                (path, number(query.strip_prefix("db=").ok_or("it has an option other than `db`")?)?)
            }
            None => (path, 0),
        };
        if !path.starts_with('/') {
            return Err("the path of a socket must begin with `/`");
        }
        // The kernel's limit without the terminating zero.
        if path.len() > 107 {
            return Err("the path of a socket may have at most 107 bytes");
        }
        Ok(Url { address: Address::Unix(PathBuf::from(path)), is_tls: false, credentials, database })
    }

    fn tcp(rest: &str, is_tls: bool) -> Result<Url, &'static str> {
        let (credentials, place) = split_credentials(rest)?;
        if place.contains(['?', '#']) {
            return Err("it has options behind `?` or `#`, where a password cannot stand either");
        }
        let (place, database) = match place.split_once('/') {
            Some((place, "")) => (place, 0),
            Some((place, database)) => (place, number(database)?),
            None => (place, 0),
        };
        let (host, port) = match place.strip_prefix('[') {
            Some(bracketed) => {
                let (host, port) = bracketed.split_once(']').ok_or("a bracket is not closed")?;
                host.parse::<std::net::Ipv6Addr>().map_err(|_| "its brackets do not hold an IPv6 address")?;
                (host, port.strip_prefix(':').or(port.is_empty().then_some("")).ok_or("its port is not valid")?)
            }
            None => place.split_once(':').unwrap_or((place, "")),
        };
        if host.is_empty() {
            return Err("it has no host");
        }
        let port = if port.is_empty() { DEFAULT_PORT } else { port.parse().map_err(|_| "its port is not valid")? };
        Ok(Url { address: Address::Tcp { host: host.to_string(), port }, is_tls, credentials, database })
    }
}

fn split_credentials(rest: &str) -> Result<(Credentials, &str), &'static str> {
    let Some((who, place)) = rest.rsplit_once('@') else { return Ok((Credentials::default(), rest)) };
    let (user, password) = who.split_once(':').map_or((who, None), |(user, password)| (user, Some(password)));
    let user = if user.is_empty() { None } else { Some(decode(user)?) };
    let password = password.map(decode).transpose()?;
    // Copied from what a command printed.
    if password.as_deref() == Some(MASK) {
        return Err("its password is `***`, which commands print in the place of a password");
    }
    Ok((Credentials { user, password: password.map(Password::Text) }, place))
}

/// Decodes `%xx`.
fn decode(text: &str) -> Result<String, &'static str> {
    const BAD: &str = "a `%` is not followed by two hexadecimal digits";
    let (mut bytes, mut rest) = (Vec::new(), text.as_bytes());
    while let Some((byte, behind)) = rest.split_first() {
        rest = behind;
        if *byte != b'%' {
            bytes.push(*byte);
            continue;
        }
        let digits = rest.get(..2).filter(|digits| digits.iter().all(u8::is_ascii_hexdigit));
        let digits = digits.and_then(|digits| std::str::from_utf8(digits).ok()).ok_or(BAD)?;
        bytes.push(u8::from_str_radix(digits, 16).map_err(|_| BAD)?);
        rest = &rest[2..];
    }
    String::from_utf8(bytes).map_err(|_| "a user or password is not UTF-8")
}

fn number(text: &str) -> Result<u32, &'static str> {
    text.parse().map_err(|_| "its database is not a number")
}

/// A URL that may be printed. What stands before the last `@` may hold a password also where the scheme is mistyped.
pub fn without_password(url: &str) -> String {
    let scheme = url.split_once("://").filter(|(scheme, _)| scheme.bytes().all(|byte| byte.is_ascii_alphanumeric()));
    let (scheme, rest) = scheme.map_or((String::new(), url), |(scheme, rest)| (format!("{scheme}://"), rest));
    match rest.rsplit_once('@') {
        Some((_, place)) => format!("{scheme}{MASK}@{}", shown_place(place)),
        None => format!("{scheme}{}", shown_place(rest)),
    }
}

/// What stands in a URL behind the `@`, or without one behind the scheme, as it may be printed. Somebody may have
/// written a password where a port or an option is expected.
pub fn shown_place(place: &str) -> String {
    let (place, options) = place.split_at(place.find(['?', '#']).unwrap_or(place.len()));
    let options = match options.strip_prefix("?db=").unwrap_or(options) {
        "" => String::new(),
        database if database.bytes().all(|byte| byte.is_ascii_digit()) => options.to_owned(),
        _ => format!("{}{MASK}", &options[..1]),
    };
    let end = if place.starts_with('[') { place.find("]:").map(|at| at + 1) } else { place.find(':') };
    let (host, port) = place.split_at(end.unwrap_or(place.len()));
    let is_port = port.bytes().skip(1).all(|byte| byte.is_ascii_digit() || byte == b'/');
    format!("{host}{}{options}", if is_port { port.to_owned() } else { format!(":{MASK}") })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tcp(host: &str, port: u16) -> Address {
        Address::Tcp { host: host.to_string(), port }
    }

    #[test]
    fn urls_of_all_kinds_are_read() {
        let url = |text| Url::parse(text).unwrap();
        assert_eq!(url("redis://cache").address, tcp("cache", 6379));
        assert_eq!(url("redis://cache/").database, 0);
        assert_eq!(url("redis://10.0.0.1:7000/3").database, 3);
        assert_eq!(url("redis://[fd00::1]:7000").address, tcp("fd00::1", 7000));
        assert_eq!(url("redis://[::1]").address.to_string(), "[::1]:6379");
        let tls = url("rediss://reader:p%40ss:w@cache:1");
        assert!(tls.is_tls);
        assert_eq!(tls.credentials.user.as_deref(), Some("reader"));
        assert_eq!(tls.credentials.password, Some(Password::from("p@ss:w")));
        assert_eq!(url("redis://:secret@cache").credentials.user, None);
        let user = url("redis://reader@cache").credentials;
        assert_eq!((user.user.as_deref(), user.password), (Some("reader"), None), "its password may come from a file");
        let unix = url("unix:///run/redis.sock?db=2");
        assert_eq!((unix.address, unix.database), (Address::Unix("/run/redis.sock".into()), 2));
    }

    #[test]
    fn a_bad_url_is_refused_with_a_hint_and_without_its_password() {
        let bad = [
            "cache:6379",
            "http://cache",
            "redis://",
            "redis://cache:seven",
            "redis://cache/db",
            "redis://[::1",
            "redis://[cache]:1",
            "unix://relative",
            "redis://u:secret%zz@cache",
            "redis://u:secret%+1@cache",
            "redis:/u:secret@cache",
            "u:secret@cache",
            "u:secret@redis://cache",
            "redis://cache?password=secret",
            "redis://cache/0?password=secret",
            "redis://cache#secret",
            "redis://u:secret",
            "redis://:secret/0",
            "redis://[::1]:secret",
            "unix:///run/redis.sock?password=secret",
            "unix:///run/redis.sock?db=secret",
            "redis://u:***@cache",
        ];
        for text in bad {
            let error = Url::parse(text).unwrap_err();
            assert!(error.hint_text().is_some() && !error.to_string().contains("secret"), "{text}: {error}");
        }
        let url = Url::parse("redis://u:secret@cache").unwrap();
        assert!(!format!("{url:?}").contains("secret"));
        for (url, shown) in [
            ("redis://u:secret@cache:1/2", "redis://***@cache:1/2"),
            ("redis://cache:6379?password=secret", "redis://cache:6379?***"),
            ("redis://[fd00::1]:7000/3", "redis://[fd00::1]:7000/3"),
            ("unix:///run/redis.sock?db=2", "unix:///run/redis.sock?db=2"),
            ("redis://cache:secret", "redis://cache:***"),
        ] {
            assert_eq!(without_password(url), shown);
        }
    }

    #[test]
    fn addresses_that_a_cluster_tells_are_read() {
        let teller = tcp("10.0.0.1", 7000);
        assert_eq!(Address::told("10.0.0.2:7001", &teller), Some(tcp("10.0.0.2", 7001)));
        assert_eq!(Address::told("fd00::1:7001", &teller), Some(tcp("fd00::1", 7001)));
        assert_eq!(Address::told(":7002", &teller), Some(tcp("10.0.0.1", 7002)), "no host: that of who tells");
        assert_eq!(Address::told("?:7002", &teller), None, "a host that is not known is nobody's");
        assert_eq!(Address::told("nonsense", &teller), None);
    }

    mod fuzz {
        use forebay_fuzz::Target;

        use super::*;

        const PASSWORD: &str = "OPENSESAME";

        #[test]
        fn whatever_url_is_given_its_password_is_not_printed() {
            let urls = [
                "redis://reader:OPENSESAME@cache:1",
                "rediss://:OPENSESAME%40@[fd00::1]:7000/3",
                "unix://u:OPENSESAME@/run/redis.sock?db=2",
                "redis://OPENSESAME:@cache",
                "redis://cache?password=OPENSESAME",
            ];
            let inputs = urls.map(|url| url.as_bytes().to_vec()).to_vec();
            let words: [&[u8]; 8] = [b"://", b"@", b":", b"/", b"%", b"[::1]", b"redis", b"?db="];
            Target::new("urls", inputs).words(&words).cases(40_000).run(|bytes| {
                let text = String::from_utf8_lossy(bytes);
                let parsed = Url::parse(&text);
                let who = text.rsplit_once('@').map_or("", |(who, _)| who);
                let credentials = who.split_once("://").map_or(who, |(_, credentials)| credentials);
                // As somebody wrote it who meant it to be the password. The user is printed.
                let place = text.rsplit_once('@').map_or(&*text, |(_, place)| place);
                let is_option = place.split_once('?').is_some_and(|(_, options)| options.contains(PASSWORD));
                let is_password = credentials.split_once(':').is_some_and(|(_, rest)| rest.contains(PASSWORD));
                let is_password = (is_password || is_option) && text.matches(PASSWORD).count() == 1;
                let printed = match &parsed {
                    Ok(url) => format!("{url:?}"),
                    Err(error) => error.to_string(),
                };
                assert!(!is_password || !printed.contains(PASSWORD), "{text}: {printed}");
                parsed
                    .map(|url| (url.is_tls, url.credentials.user.is_some(), url.credentials.password.is_some()))
                    .map_err(|error| error.to_string().split(" (").next().unwrap_or_default().to_owned())
            });
        }
    }
}
