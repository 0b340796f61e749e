//! The types that a configuration value can have, how each is written and read.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;

use forebay_core::policy::PolicyChoice;
use forebay_core::size;
use forebay_core::tiers::Admission;
use forebay_io::pool::HugePages;
use forebay_io::redis::{MASK, shown_place};
use toml::Value;

/// A type that can stand in the file. What `show` gives, `read` takes back.
pub trait Setting: Sized {
    /// What a value looks like, for people.
    const KIND: &'static str;
    /// Whether a value may hold a password, so that not even one that does not fit is shown.
    const IS_SECRET: bool = false;
    /// Whether a value is a path, or a list of them, which must mean the same from every working directory.
    const IS_PATH: bool = false;
    /// None if the value does not fit.
    fn read(value: &Value) -> Option<Self>;
    /// None if the setting is not set.
    fn show(&self) -> Option<Value>;
}

/// A size; written as a number of bytes or with a unit, such as `"8GiB"`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Bytes(pub u64);

impl Bytes {
    /// Whether the value is written as a size is, and 64 bits cannot count its bytes.
    pub(super) fn is_too_large(value: &Value) -> bool {
        value.as_str().is_some_and(|text| size::parse(text) == Err(size::Wrong::TooLarge))
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&size::exact(self.0))
    }
}

impl Setting for Bytes {
    const KIND: &'static str =
        "a size, such as `8589934592` or `\"8GiB\"`: a number of bytes, or a number with KiB, MiB, GiB or TiB";

    fn read(value: &Value) -> Option<Bytes> {
        match value {
            Value::Integer(bytes) => u64::try_from(*bytes).ok().map(Bytes),
            Value::String(text) => size::parse(text).ok().map(Bytes),
            _ => None,
        }
    }

    fn show(&self) -> Option<Value> {
        Some(Value::String(self.to_string()))
    }
}

/// Where a server is, and perhaps who we are to it. Shown without the password: what is shown may be read by many.
#[derive(Clone, PartialEq, Eq)]
pub struct ServerUrl(pub String);

impl fmt::Debug for ServerUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.to_string())
    }
}

impl fmt::Display for ServerUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = self.0.split_once("://");
        let parts = parts.filter(|(scheme, _)| scheme.bytes().all(|byte| byte.is_ascii_alphanumeric()));
        match (parts, parts.map_or(&*self.0, |(_, rest)| rest).rsplit_once('@')) {
            (Some((scheme, _)), Some((who, place))) => {
                let user = who.split_once(':').map_or(who, |(user, _)| user);
                write!(f, "{scheme}://{user}:{MASK}@{}", shown_place(place))
            }
            (Some((scheme, rest)), None) => write!(f, "{scheme}://{}", shown_place(rest)),
            // The scheme is mistyped, so nothing tells where a password begins.
            (None, Some((_, place))) => write!(f, "{MASK}@{}", shown_place(place)),
            (None, None) => f.write_str(&shown_place(&self.0)),
        }
    }
}

/// A password. Never shown, for the same reason.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(pub String);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(MASK)
    }
}

impl Setting for Secret {
    const KIND: &'static str = "text";
    const IS_SECRET: bool = true;

    fn read(value: &Value) -> Option<Secret> {
        String::read(value).map(Secret)
    }

    fn show(&self) -> Option<Value> {
        Some(Value::String(MASK.to_string()))
    }
}

/// How a line of the log is written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LogFormat {
    Text,
    Json,
}

impl Setting for LogFormat {
    const KIND: &'static str = "`\"text\"` or `\"json\"`";

    fn read(value: &Value) -> Option<LogFormat> {
        match value.as_str()? {
            "text" => Some(LogFormat::Text),
            "json" => Some(LogFormat::Json),
            _ => None,
        }
    }

    fn show(&self) -> Option<Value> {
        let text = match self {
            LogFormat::Text => "text",
            LogFormat::Json => "json",
        };
        Some(Value::String(text.to_string()))
    }
}

impl Setting for HugePages {
    const KIND: &'static str = "`\"auto\"`, `\"off\"` or `\"require\"`";

    fn read(value: &Value) -> Option<HugePages> {
        match value.as_str()? {
            "auto" => Some(HugePages::Auto),
            "off" => Some(HugePages::Off),
            "require" => Some(HugePages::Require),
            _ => None,
        }
    }

    fn show(&self) -> Option<Value> {
        let text = match self {
            HugePages::Auto => "auto",
            HugePages::Off => "off",
            HugePages::Require => "require",
        };
        Some(Value::String(text.to_string()))
    }
}

impl Setting for PolicyChoice {
    const KIND: &'static str = "`\"default\"`, `\"lru\"` or `\"tinylfu\"`";

    fn read(value: &Value) -> Option<PolicyChoice> {
        let name = value.as_str()?;
        PolicyChoice::ALL.into_iter().find(|choice| choice.name() == name)
    }

    fn show(&self) -> Option<Value> {
        Some(Value::String(self.name().to_string()))
    }
}

impl Setting for Admission {
    const KIND: &'static str = "`\"second_sighting\"` or `\"all\"`";

    fn read(value: &Value) -> Option<Admission> {
        match value.as_str()? {
            "second_sighting" => Some(Admission::SecondSighting),
            "all" => Some(Admission::All),
            _ => None,
        }
    }

    fn show(&self) -> Option<Value> {
        let text = match self {
            Admission::SecondSighting => "second_sighting",
            Admission::All => "all",
        };
        Some(Value::String(text.to_string()))
    }
}

/// Where the HTTP pages are served, if anywhere.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HttpAddress {
    Off,
    At(SocketAddr),
}

impl Setting for HttpAddress {
    const KIND: &'static str = "an address and port, such as `\"127.0.0.1:9477\"`, or `\"off\"`";

    fn read(value: &Value) -> Option<HttpAddress> {
        match value.as_str()? {
            "off" => Some(HttpAddress::Off),
            address => address.parse().ok().map(HttpAddress::At),
        }
    }

    fn show(&self) -> Option<Value> {
        Some(Value::String(match self {
            HttpAddress::Off => "off".to_string(),
            HttpAddress::At(address) => address.to_string(),
        }))
    }
}

impl Setting for bool {
    const KIND: &'static str = "`true` or `false`";

    fn read(value: &Value) -> Option<bool> {
        value.as_bool()
    }

    fn show(&self) -> Option<Value> {
        Some(Value::Boolean(*self))
    }
}

impl Setting for u32 {
    const KIND: &'static str = "a whole number";

    fn read(value: &Value) -> Option<u32> {
        u32::try_from(value.as_integer()?).ok()
    }

    fn show(&self) -> Option<Value> {
        Some(Value::Integer(i64::from(*self)))
    }
}

impl Setting for u64 {
    const KIND: &'static str = "a whole number";

    fn read(value: &Value) -> Option<u64> {
        u64::try_from(value.as_integer()?).ok()
    }

    fn show(&self) -> Option<Value> {
        i64::try_from(*self).ok().map(Value::Integer)
    }
}

impl Setting for f64 {
    const KIND: &'static str = "a number";

    fn read(value: &Value) -> Option<f64> {
        value.as_float().or_else(|| value.as_integer().map(|whole| whole as f64))
    }

    fn show(&self) -> Option<Value> {
        Some(Value::Float(*self))
    }
}

impl Setting for String {
    const KIND: &'static str = "text";

    fn read(value: &Value) -> Option<String> {
        value.as_str().map(str::to_string)
    }

    fn show(&self) -> Option<Value> {
        Some(Value::String(self.clone()))
    }
}

impl Setting for PathBuf {
    const KIND: &'static str = "a path";
    const IS_PATH: bool = true;

    fn read(value: &Value) -> Option<PathBuf> {
        value.as_str().filter(|path| !path.is_empty()).map(PathBuf::from)
    }

    fn show(&self) -> Option<Value> {
        self.to_str().map(|path| Value::String(path.to_string()))
    }
}

impl Setting for Vec<u32> {
    const KIND: &'static str = "a list of whole numbers, such as `[1000, 1001]`";

    fn read(value: &Value) -> Option<Vec<u32>> {
        value.as_array()?.iter().map(u32::read).collect()
    }

    fn show(&self) -> Option<Value> {
        self.iter().map(Setting::show).collect::<Option<Vec<Value>>>().map(Value::Array)
    }
}

impl Setting for Vec<String> {
    const KIND: &'static str = "a list of names, such as `[\"forebay.example.org\"]`";

    fn read(value: &Value) -> Option<Vec<String>> {
        value.as_array()?.iter().map(String::read).collect()
    }

    fn show(&self) -> Option<Value> {
        self.iter().map(Setting::show).collect::<Option<Vec<Value>>>().map(Value::Array)
    }
}

impl Setting for Vec<PathBuf> {
    const KIND: &'static str = "a path, or a list of paths, such as `[\"/mnt/a/forebay\", \"/mnt/b/forebay\"]`";
    const IS_PATH: bool = true;

    /// Text that begins like a list is one, so that a variable can name several.
    fn read(value: &Value) -> Option<Vec<PathBuf>> {
        match value {
            Value::Array(list) => list.iter().map(PathBuf::read).collect(),
            Value::String(text) if text.starts_with('[') => None,
            one => PathBuf::read(one).map(|path| vec![path]),
        }
    }

    fn show(&self) -> Option<Value> {
        self.iter().map(Setting::show).collect::<Option<Vec<Value>>>().map(Value::Array)
    }
}

impl Setting for Vec<ServerUrl> {
    const KIND: &'static str = "a URL, or a list of URLs, such as `[\"redis://10.0.0.1\", \"redis://10.0.0.2\"]`";
    const IS_SECRET: bool = true;

    /// As for paths.
    fn read(value: &Value) -> Option<Vec<ServerUrl>> {
        let url = |value: &Value| String::read(value).map(ServerUrl);
        match value {
            Value::Array(list) => list.iter().map(url).collect(),
            Value::String(text) if text.is_empty() || text.starts_with('[') => None,
            one => url(one).map(|url| vec![url]),
        }
    }

    fn show(&self) -> Option<Value> {
        Some(Value::Array(self.iter().map(|url| Value::String(url.to_string())).collect()))
    }
}

impl<T: Setting> Setting for Option<T> {
    const KIND: &'static str = T::KIND;
    const IS_SECRET: bool = T::IS_SECRET;
    const IS_PATH: bool = T::IS_PATH;

    fn read(value: &Value) -> Option<Option<T>> {
        T::read(value).map(Some)
    }

    fn show(&self) -> Option<Value> {
        self.as_ref().and_then(Setting::show)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_is_a_number_or_a_text_and_is_shown_as_it_is_read() {
        assert_eq!(Bytes::read(&Value::String("1.5GiB".to_string())), Some(Bytes(3 << 29)));
        assert_eq!(Bytes::read(&Value::Integer(-1)), None);
        for bytes in [0, 4096, 4097, 1536 << 20] {
            assert_eq!(Bytes::read(&Bytes(bytes).show().unwrap()), Some(Bytes(bytes)));
        }
    }

    #[test]
    fn a_password_is_not_shown() {
        for (url, shown) in [
            ("redis://cache:6379/1", "redis://cache:6379/1"),
            ("redis://:secret@cache", "redis://:***@cache"),
            ("rediss://me:sec@ret@[::1]:7", "rediss://me:***@[::1]:7"),
            ("redis:/me:secret@cache", "***@cache"),
            ("me:secret@cache", "***@cache"),
            ("me:secret@redis://cache", "***@redis:***"),
            ("redis://cache?password=secret", "redis://cache?***"),
            ("redis://:secret", "redis://:***"),
            ("redis:/secret", "redis:***"),
            ("unix:///run/redis.sock?db=1", "unix:///run/redis.sock?db=1"),
        ] {
            let url = ServerUrl(url.to_string());
            assert_eq!((url.to_string(), format!("{url:?}")), (shown.to_string(), format!("{shown:?}")));
        }
        let secret = Secret::read(&Value::String("secret".to_string())).unwrap();
        assert_eq!((secret.show(), format!("{secret:?}")), (Some(Value::String("***".to_string())), "***".to_string()));
    }

    #[test]
    fn numbers_out_of_range_are_not_wrapped() {
        assert_eq!(u32::read(&Value::Integer(1 << 32)), None);
        assert_eq!(u64::read(&Value::Integer(-1)), None);
        assert_eq!(f64::read(&Value::Integer(1)), Some(1.0));
    }
}
