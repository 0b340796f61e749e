//! From file, environment and flags to a checked [`Config`] that knows where each value came from.
//!
//! A flag beats a variable, a variable beats the file, the file beats the default. Nothing is passed over in
//! silence: a name that is no key is an error which offers the nearest one. A variable that resembles no key may be
//! somebody else's: it is a warning.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use forebay_core::{Error, ErrorKind, Result};
use forebay_rpc::client::{CONFIG_VARIABLE, config_file, read_config};
use toml::{Table, Value};

use super::check::{first_unmet, idle};
use super::demand::Idle;
use super::names::{check_names, find, key_of, unknown_keys};
use super::{Bytes, Config, Key, Setting};

/// Where values may come from.
#[derive(Clone, Debug, Default)]
pub struct Sources {
    /// The file, if a flag named one; otherwise `FOREBAY_CONFIG` does, or it is the usual one: see [`config_file`].
    pub file: Option<PathBuf>,
    /// Read if it is there, and nobody names another.
    pub usual_file: Option<PathBuf>,
    /// Name and value of every environment variable; those without our prefix are passed over.
    pub variables: Vec<(String, String)>,
    /// Key and value, as in `--pool.capacity_bytes 8GiB`.
    pub flags: Vec<(String, String)>,
}

/// Who set a value.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Origin {
    Default,
    File(PathBuf),
    Variable(String),
    Flag,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::Default => write!(f, "default"),
            Origin::File(path) => write!(f, "file {}", path.display()),
            Origin::Variable(name) => write!(f, "variable {name}"),
            Origin::Flag => write!(f, "flag"),
        }
    }
}

/// The configuration and its history.
#[derive(Debug)]
pub struct Loaded {
    pub config: Config,
    /// Each a sentence.
    pub warnings: Vec<String>,
    /// The file that was read.
    pub file: Option<PathBuf>,
    /// Who set a key, and what they wrote.
    origins: BTreeMap<&'static str, (Origin, String)>,
}

impl Loaded {
    pub fn origin(&self, key: &Key) -> &Origin {
        self.origins.get(key.name).map_or(&Origin::Default, |(origin, _)| origin)
    }
}

/// Reads all sources and checks the result. Errors are `Invalid`, or `Io` if the file cannot be read.
pub fn load(sources: &Sources) -> Result<Loaded> {
    let file = file(sources);
    let mut loaded =
        Loaded { config: Config::default(), warnings: Vec::new(), file: file.clone(), origins: BTreeMap::new() };
    if let Some(path) = file {
        let written = read_file(&path)?;
        let unknown: Vec<&str> =
            written.iter().map(|(name, _)| name.as_str()).filter(|name| find(name).is_none()).collect();
        if !unknown.is_empty() {
            return Err(unknown_keys(&unknown).with("file", path.display()));
        }
        for (key, value) in written.iter().filter_map(|(name, value)| Some((find(name)?, value))) {
            loaded.set(key, value, Origin::File(path.clone()))?;
        }
    }
    loaded.warnings = check_names(&sources.variables)?;
    for (name, text) in &sources.variables {
        if let Some(key) = key_of(name).filter(|key| !is_unset(key, text)) {
            loaded.set_text(key, text, Origin::Variable(name.clone()))?;
        }
    }
    for (name, text) in &sources.flags {
        let key = find(name).ok_or_else(|| unknown_keys(&[name]))?;
        loaded.set_text(key, text, Origin::Flag)?;
    }
    match first_unmet(&loaded.config).and_then(|demand| Some((find(&demand.key)?, demand.must))) {
        Some((key, must)) => Err(loaded.cannot_be(key, &must)),
        None => {
            let unused = loaded.without_effect();
            loaded.warnings.extend(unused);
            Ok(loaded)
        }
    }
}

/// To clients, an empty variable says nothing of where the daemon is. The daemon has to be where they look.
fn is_unset(key: &Key, text: &str) -> bool {
    key.name == "socket.directory" && text.is_empty()
}

impl Loaded {
    /// In flags and variables a value is written as in the file, and text may go without its quotes.
    fn set_text(&mut self, key: &'static Key, text: &str, origin: Origin) -> Result<()> {
        let quoted = Value::String(text.to_string());
        if self.config.set(key, &quoted) {
            return self.came_from(key, origin, text.to_owned());
        }
        let bare = format!("value = {text}").parse::<Table>().ok().and_then(|mut table| table.remove("value"));
        self.take(key, &bare.unwrap_or(quoted), origin, text.to_owned())
    }

    fn set(&mut self, key: &'static Key, value: &Value, origin: Origin) -> Result<()> {
        let written = value.as_str().map_or_else(|| value.to_string(), str::to_string);
        self.take(key, value, origin, written)
    }

    /// `written` is how the value is shown to whoever wrote it.
    fn take(&mut self, key: &'static Key, value: &Value, origin: Origin, written: String) -> Result<()> {
        if !self.config.set(key, value) {
            let shown = if key.is_secret { "***" } else { &written };
            let hint = match key.kind == Bytes::KIND && Bytes::is_too_large(value) {
                true => "it is too large: give less than 16777216TiB".to_string(),
                false => format!("give {}", key.kind),
            };
            return Err(Error::invalid(format!("`{}` cannot be `{shown}`", key.name)).with("from", origin).hint(hint));
        }
        self.came_from(key, origin, written)
    }

    /// Of the value that was set last. A relative path means another place from another working directory: a flag's is
    /// made whole where it is given, and others are refused. `//` and `/./` in a path mean `/`, wherever it comes from.
    fn came_from(&mut self, key: &'static Key, origin: Origin, written: String) -> Result<()> {
        let value = self.config.value(key).filter(|_| key.is_path);
        for path in value.iter().flat_map(texts).map(Path::new).filter(|path| path.is_relative()) {
            let whole = whole(path)?;
            if origin != Origin::Flag {
                return Err(Error::invalid(format!("`{}` cannot be `{}`", key.name, path.display()))
                    .with("from", origin)
                    .hint(format!("give a path that begins with `/`, such as `{}`", whole.display())));
            }
        }
        if let Some(value) = &value {
            self.config.set(key, &with_whole_paths(value)?);
        }
        self.origins.insert(key.name, (origin, written));
        Ok(())
    }

    /// Keys that somebody set to other values than the usual ones, and that have no effect.
    fn without_effect(&self) -> Vec<String> {
        let usual = Config::default();
        let is_set = |key: &&Key| *self.origin(key) != Origin::Default && self.config.value(key) != usual.value(key);
        let told = |Idle { keys, because }| {
            let set = keys.iter().filter_map(|name| find(name)).filter(is_set);
            let set: Vec<String> = set.map(|key| format!("`{}`", key.name)).collect();
            let have = if set.len() == 1 { "has" } else { "have" };
            (!set.is_empty()).then(|| format!("{} {have} no effect: {because}", set.join(", ")))
        };
        idle(&self.config).into_iter().filter_map(told).collect()
    }

    /// The value is shown as it was written, unless it may hold a password.
    fn cannot_be(&self, key: &Key, must: &str) -> Error {
        let written = self.origins.get(key.name).map(|(_, written)| written.clone()).filter(|_| !key.is_secret);
        let value = || self.config.value(key).map_or_else(String::new, |value| value.to_string());
        let shown = written.unwrap_or_else(|| value().trim_matches('"').to_owned());
        Error::invalid(format!("`{}` cannot be `{shown}`", key.name))
            .with("from", self.origin(key))
            .hint(format!("it must {must}"))
    }
}

/// The text, or those of a list.
fn texts(value: &Value) -> Vec<&str> {
    let list = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
    list.iter().filter_map(Value::as_str).collect()
}

fn with_whole_paths(value: &Value) -> Result<Value> {
    match value {
        Value::Array(list) => list.iter().map(with_whole_paths).collect::<Result<_>>().map(Value::Array),
        Value::String(path) => Ok(Value::String(whole(Path::new(path))?.to_string_lossy().into_owned())),
        other => Ok(other.clone()),
    }
}

/// The path from the root, without a look at the disk.
fn whole(path: &Path) -> Result<PathBuf> {
    std::path::absolute(path).map_err(|error| {
        Error::new(ErrorKind::Io, "cannot tell the working directory")
            .source(error)
            .hint("give a path that begins with `/`")
    })
}

fn file(sources: &Sources) -> Option<PathBuf> {
    let named = sources.variables.iter().find(|(name, _)| name == CONFIG_VARIABLE).map(|(_, path)| Path::new(path));
    sources.file.clone().or_else(|| config_file(named, sources.usual_file.as_deref()))
}

/// The file's keys with their full names, in the file's order of sections.
fn read_file(path: &Path) -> Result<Vec<(String, Value)>> {
    let mut keys = Vec::new();
    flatten("", read_config(path)?, &mut keys);
    Ok(keys)
}

fn flatten(prefix: &str, table: Table, keys: &mut Vec<(String, Value)>) {
    for (name, value) in table {
        let name = if prefix.is_empty() { name } else { format!("{prefix}.{name}") };
        match value {
            Value::Table(table) => flatten(&name, table, keys),
            value => keys.push((name, value)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Bytes, keys};

    fn pairs(list: &[(&str, &str)]) -> Vec<(String, String)> {
        list.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect()
    }

    fn with_file(text: &str, variables: &[(&str, &str)], flags: &[(&str, &str)]) -> Result<Loaded> {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("forebay.toml");
        std::fs::write(&file, text).unwrap();
        load(&Sources { file: Some(file), usual_file: None, variables: pairs(variables), flags: pairs(flags) })
    }

    fn refusal(text: &str, variables: &[(&str, &str)], flags: &[(&str, &str)]) -> (String, String) {
        let error = with_file(text, variables, flags).unwrap_err();
        (error.to_string(), error.hint_text().expect("every refusal has a hint").to_string())
    }

    #[test]
    fn an_empty_variable_of_the_sockets_counts_as_not_set_as_for_clients() {
        let empty = [("FOREBAY_SOCKET_DIRECTORY", "")];
        let loaded = with_file("socket.directory = '/run/ours'", &empty, &[]).unwrap();
        assert_eq!(loaded.config.socket.directory, Path::new("/run/ours"));
        let usual = with_file("", &empty, &[]).unwrap();
        assert_eq!(usual.config.socket.directory, Config::default().socket.directory);
        assert!(with_file("", &[("FOREBAY_POOL_DIRECTORY", "")], &[]).is_err(), "nobody else reads it otherwise");
    }

    fn values(loaded: Result<Loaded>) -> Vec<(&'static str, Option<Value>)> {
        let config = loaded.unwrap().config;
        keys().into_iter().map(|key| (key.name, config.value(key))).collect()
    }

    fn origin(loaded: &Loaded, name: &str) -> Origin {
        loaded.origin(find(name).unwrap()).clone()
    }

    #[test]
    fn a_flag_beats_a_variable_beats_the_file_beats_the_default() {
        let file = "[limits]\nengines = 1\nkeys_per_lookup = 1\nblocks_per_commit = 1\n";
        let variables = [("FOREBAY_LIMITS_KEYS_PER_LOOKUP", "2"), ("FOREBAY_LIMITS_BLOCKS_PER_COMMIT", "2")];
        let loaded = with_file(file, &variables, &[("limits.blocks_per_commit", "3")]).unwrap();
        let limits = &loaded.config.limits;
        assert_eq!((limits.engines, limits.keys_per_lookup, limits.blocks_per_commit), (1, 2, 3));
        assert!(matches!(origin(&loaded, "limits.engines"), Origin::File(_)));
        assert_eq!(
            origin(&loaded, "limits.keys_per_lookup"),
            Origin::Variable("FOREBAY_LIMITS_KEYS_PER_LOOKUP".into())
        );
        assert_eq!(origin(&loaded, "limits.blocks_per_commit"), Origin::Flag);
        assert_eq!(origin(&loaded, "limits.leases_per_session"), Origin::Default);
        assert_eq!(limits.leases_per_session, Config::default().limits.leases_per_session);
    }

    #[test]
    fn the_usual_file_is_read_if_it_is_there_and_nobody_names_another() {
        let directory = tempfile::tempdir().unwrap();
        let [usual, other] = ["usual", "other"].map(|name| directory.path().join(name));
        let engines = |file: Option<&PathBuf>, variables: &[(&str, &str)]| {
            let (file, variables) = (file.cloned(), pairs(variables));
            let loaded =
                load(&Sources { file, usual_file: Some(usual.clone()), variables, flags: Vec::new() }).unwrap();
            (loaded.config.limits.engines, loaded.file)
        };
        let default = Config::default().limits.engines;
        assert_eq!(engines(None, &[]), (default, None));
        std::fs::write(&usual, "[limits]\nengines = 1\n").unwrap();
        std::fs::write(&other, "[limits]\nengines = 2\n").unwrap();
        assert_eq!(engines(None, &[]), (1, Some(usual.clone())));
        assert_eq!(engines(Some(&other), &[]), (2, Some(other.clone())));
        assert_eq!(engines(None, &[("FOREBAY_CONFIG", other.to_str().unwrap())]), (2, Some(other)));
        assert_eq!(engines(None, &[("FOREBAY_CONFIG", "")]), (default, None), "an empty name means no file");
    }

    #[test]
    fn a_value_reads_the_same_from_file_variable_and_flag() {
        for (name, text, in_file) in [
            ("pool.capacity_bytes", "3GiB", "\"3GiB\""),
            ("pool.capacity_bytes", "3221225472", "3221225472"),
            ("pool.unit_bytes", "2MiB", "\"2MiB\""),
            ("pool.huge_pages", "require", "\"require\""),
            ("pool.promise_share", "0.25", "0.25"),
            ("pool.policy", "lru", "\"lru\""),
            ("pool.policy", "tinylfu", "\"tinylfu\""),
            ("socket.allow_uids", "[1000, 1001]", "[1000, 1001]"),
            ("socket.directory", "/run/elsewhere", "\"/run/elsewhere\""),
            ("http.address", "off", "\"off\""),
            ("http.allow_remote", "true", "true"),
            ("http.hosts", "[\"a.example\"]", "[\"a.example\"]"),
            ("log.level", "warn,forebay_daemon=debug", "\"warn,forebay_daemon=debug\""),
            ("drain.deadline_seconds", "0", "0"),
            ("tier.fs.streams", "3", "3"),
            ("tier.redis.urls", "redis://a", "\"redis://a\""),
        ] {
            let variable = find(name).unwrap().variable();
            let from_file = values(with_file(&format!("{name} = {in_file}"), &[], &[]));
            assert_ne!(from_file, values(load(&Sources::default())), "{name} from the file changed nothing");
            assert_eq!(values(with_file("", &[(&variable, text)], &[])), from_file, "{name} from its variable");
            assert_eq!(values(with_file("", &[], &[(name, text)])), from_file, "{name} from its flag");
        }
    }

    #[test]
    fn an_unknown_name_is_refused_with_the_nearest_key() {
        let (message, hint) = refusal("[pool]\ncapcity_bytes = 1\n", &[], &[]);
        assert!(message.contains("unknown key `pool.capcity_bytes`") && message.contains("forebay.toml"), "{message}");
        assert_eq!(hint, "did you mean `pool.capacity_bytes`?");
        let (message, hint) = refusal("", &[("FOREBAY_POOL_CAPACITY", "1GiB")], &[]);
        assert_eq!(message, "unknown variable `FOREBAY_POOL_CAPACITY`");
        assert_eq!(hint, "did you mean `FOREBAY_POOL_CAPACITY_BYTES`?");
        assert_eq!(refusal("", &[], &[("engines", "3")]).1, "did you mean `limits.engines`?");
        // `forebay config` refuses such a file too, so the hint does not lead there.
        let list = "docs/config.md and `forebay serve --help` have all keys";
        assert_eq!(refusal("nonsense = 1", &[], &[]).1, list);
        let (message, hint) = refusal("nonsense = 1\n[pool]\ncapcity_bytes = 1\n", &[], &[]);
        assert!(message.contains("unknown keys `nonsense`, `pool.capcity_bytes`"), "{message}");
        assert_eq!(hint, format!("`nonsense`: {list}; `pool.capcity_bytes`: did you mean `pool.capacity_bytes`?"));
        // The same word is a key of another section, which was not meant.
        let (_, hint) = refusal("[tier.object]\nurls = \"x\"", &[], &[]);
        assert!(hint.starts_with("the keys of `tier.object` are bucket, ") && hint.contains("endpoint"), "{hint}");
        // A whole section under a wrong name is found by its keys.
        assert_eq!(refusal("[memory]\nhuge_pages = \"off\"", &[], &[]).1, "did you mean `pool.huge_pages`?");
    }

    #[test]
    fn variables_of_others_are_left_alone() {
        let names = ["PATH", "FOREBAY_BIN", "FOREBAY_SOCKET", "FOREBAY_SERVICE_HOST", "FOREBAY_PORT_9477_TCP_ADDR"];
        let services = ["FOREBAY_X_SERVICE_HOST", "FOREBAY_X_SERVICE_PORT_HTTP", "FOREBAY_X_Y_PORT_9477_TCP"];
        let addresses = [("FOREBAY_PORT", "tcp://10.0.0.1:80"), ("FOREBAY_X_PORT", "tcp://10.0.0.1:80")];
        let variables = names.into_iter().chain(services).map(|name| (name, "x")).chain(addresses).collect::<Vec<_>>();
        let loaded = with_file("", &variables, &[]);
        assert_eq!(loaded.as_ref().unwrap().warnings, [""; 0]);
        assert_eq!(values(loaded), values(load(&Sources::default())));
    }

    #[test]
    fn the_usual_variable_of_a_key_with_one_of_its_own_is_pointed_to_that_one() {
        let refused = with_file("", &[("FOREBAY_LOG_LEVEL", "debug")], &[]).unwrap_err();
        assert_eq!(refused.to_string(), "unknown variable `FOREBAY_LOG_LEVEL`");
        assert_eq!(refused.hint_text(), Some("did you mean `FOREBAY_LOG`?"));
    }

    #[test]
    fn a_variable_that_resembles_no_key_is_a_warning() {
        let loaded = with_file("", &[("FOREBAY_COLOUR", "blue")], &[]);
        let [warning] = &loaded.as_ref().unwrap().warnings[..] else { panic!("one warning") };
        assert!(warning.contains("`FOREBAY_COLOUR` names no key"), "{warning}");
        assert_eq!(values(loaded), values(load(&Sources::default())));
    }

    #[test]
    fn a_value_that_cannot_be_is_refused_with_its_origin_and_what_would_do() {
        let (message, hint) = refusal("[pool]\ncapacity_bytes = \"8 gigs\"\n", &[], &[]);
        assert!(message.starts_with("`pool.capacity_bytes` cannot be `8 gigs` (from=`file "), "{message}");
        assert!(hint.starts_with("give a size, such as `8589934592` or `\"8GiB\"`"), "{hint}");
        assert!(hint.ends_with("a number with KiB, MiB, GiB or TiB"), "{hint}");
        for (name, value) in [
            ("pool.capacity_bytes", "1"),
            ("pool.unit_bytes", "3MiB"),
            ("pool.unit_bytes", "512MiB"),
            ("pool.promise_share", "0.0"),
            ("pool.promise_share", "1.5"),
            ("pool.promise_share", "nan"),
            ("pool.policy", "lhd"),
            ("pool.policy", "LRU"),
            ("http.address", "0.0.0.0:9477"),
            ("http.address", "localhost"),
            ("limits.engines", "0"),
            ("limits.engines", "65"),
            ("limits.engines", "-1"),
            ("limits.message_bytes", "17MiB"),
            ("limits.keys_per_lookup", "0"),
            ("log.level", "verbose"),
            ("tier.ssd.write_bytes_per_day", "0"),
            ("tier.ssd.capacity_bytes", "100KiB"),
            ("tier.ssd.capacity_bytes", "0.1KiB"),
            ("pool.unit_bytes", "3.0 MiB"),
            ("pool.promise_share", "1.50"),
            ("drain.deadline_seconds", "86401"),
            ("alarm.step_seconds", "9223372036854775807"),
            ("limits.idle_seconds", "9223372036854775807"),
            ("pool.scrub_walk_seconds", "9223372036854775807"),
            ("tier.fs.load_deadline_ms", "86400001"),
            ("tier.ssd.segment_bytes", "3MiB"),
            ("tier.ssd.segment_bytes", "2GiB"),
            ("tier.fs.load_deadline_ms", "0"),
            ("tier.redis.mode", "many"),
            ("tier.redis.load_bytes_per_second", "0"),
            ("socket.directory", ""),
        ] {
            let (message, hint) = refusal("", &[], &[(name, value)]);
            assert!(message.starts_with(&format!("`{name}` cannot be `{value}` (from=`flag`)")), "{message}");
            assert!(hint.starts_with("it must ") || hint.starts_with("give "), "{hint}");
        }
        assert!(with_file("", &[], &[("http.address", "0.0.0.0:1"), ("http.allow_remote", "true")]).is_ok());
    }

    #[test]
    fn a_path_is_shown_without_empty_steps_wherever_it_comes_from() {
        let expected = Path::new("/a/b/c");
        for (file, flags) in [("[pool]\ndirectory = '/a//b/./c'\n", &[][..]), ("", &[("pool.directory", "/a//b/./c")])]
        {
            assert_eq!(with_file(file, &[], flags).unwrap().config.pool.directory.as_os_str(), expected.as_os_str());
        }
    }

    #[test]
    fn a_file_that_is_not_there_or_not_toml_is_refused_with_its_name() {
        let missing = Sources { variables: pairs(&[(CONFIG_VARIABLE, "/nowhere/forebay.toml")]), ..Sources::default() };
        assert!(load(&missing).unwrap_err().to_string().contains("/nowhere/forebay.toml"));
        assert!(refusal("[pool\n", &[], &[]).0.contains("line 1"));
    }

    #[test]
    fn a_mistyped_secret_is_not_repeated() {
        for text in [
            "[tier.redis]\nsentinel_password = 12345678\n",
            "[tier.redis]\nsentinel_password = [\"12345678\"]\n",
            "[tier.redis]\nsentinel_password = \"12345678\n",
            "[tier.redis]\nsentinel_password = 12345678z\n",
            "[tier.redis]\nurls = [\"redis://me:12345678@cache\"\n",
            "[tier.redis]\nurls = [\"redis://me:12345678@cache\", 7]\n",
            "[tier.redis]\nurls = { a = \"redis://me:12345678@cache\" }\n",
        ] {
            let (message, hint) = refusal(text, &[], &[]);
            assert!(!message.contains("12345678") && !hint.contains("12345678"), "{message}, {hint}");
            assert!(!message.contains("not valid") || message.contains("line "), "{message}");
        }
        let (message, _) = refusal("", &[], &[("tier.redis.urls", "[\"redis://me:12345678@cache\"")]);
        assert_eq!(message, "`tier.redis.urls` cannot be `***` (from=`flag`)");
    }

    #[test]
    fn the_defaults_meet_every_demand() {
        assert!(first_unmet(&Config::default()).is_none());
        assert_eq!(Config::default().pool.capacity_bytes, Bytes(4 << 30));
    }

    mod fuzz {
        use forebay_fuzz::Target;

        use super::*;

        /// As `forebay config` prints it, without what it must not print.
        fn shown(config: &Config) -> Vec<(&'static str, Value)> {
            let shown = keys().into_iter().filter(|key| !key.is_secret);
            shown.filter_map(|key| Some((key.name, config.value(key)?))).collect()
        }

        /// Text goes without its quotes.
        fn as_flags(values: &[(&str, Value)]) -> Vec<(String, String)> {
            let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            values.iter().map(|(name, value)| (name.to_string(), text(value))).collect()
        }

        fn files() -> Vec<Vec<u8>> {
            let defaults = shown(&Config::default());
            let all: String = defaults.iter().map(|(name, value)| format!("{name} = {value}\n")).collect();
            let short = "[pool]\ncapacity_bytes = \"8GiB\" # as before\npolicy = 'lru'\n[tier.ssd]\ndisks = [\"/ssd/a\", '/ssd/b']\n\
                [limits]\nengines = 0x10\n[http]\naddress = \"[::1]:0\"\nhosts = [\n\"ops\", # ours\n]\n[alarm]\n";
            vec![all.into_bytes(), short.as_bytes().to_vec()]
        }

        #[test]
        fn whatever_a_file_says_it_is_refused_or_means_what_is_shown() {
            let directory = tempfile::tempdir().unwrap();
            let path = directory.path().join("forebay.toml");
            let words: [&[u8]; 10] =
                [b"\n", b"=", b"[", b"]", b"\"\"\"", b"GiB", b"true", b"1e400", b"0xffffffffffffffff", b"pool."];
            let target = Target::new("configurations", files()).words(&words).cases(3000).allocates(400, 1 << 20);
            target.run(|bytes| {
                std::fs::write(&path, bytes).unwrap();
                let sources = Sources { file: Some(path.clone()), ..Sources::default() };
                let loaded = load(&sources).map_err(|error| {
                    assert!(error.hint_text().is_some() || std::str::from_utf8(bytes).is_err(), "{error}");
                    format!("{:?}", error.kind())
                })?;
                let values = shown(&loaded.config);
                let flags = as_flags(&values);
                let again = load(&Sources { flags, ..Sources::default() }).expect("what is shown is read");
                assert_eq!(shown(&again.config), values, "what is shown is what is meant");
                Ok::<_, String>(loaded.origins.len())
            });
        }

        #[test]
        fn whatever_a_variable_or_flag_says_it_is_refused_or_means_what_is_shown() {
            let line = |(name, value): (&str, Value)| format!("{name}={value}\n");
            let flags: String = shown(&Config::default()).into_iter().map(line).collect();
            let variables =
                "FOREBAY_POOL_CAPACITY_BYTES=8GiB\nFOREBAY_LIMITS_ENGINES=7\nFOREBAY_HTTP_HOSTS=[\"ops\"]\n";
            let inputs = vec![flags.into_bytes(), variables.as_bytes().to_vec()];
            let words: [&[u8]; 6] = [b"=", b"\n", b"FOREBAY_", b"TiB", b"18446744073709551616", b"\""];
            let target = Target::new("variables and flags", inputs).words(&words).cases(3000).allocates(400, 1 << 20);
            target.run(|bytes| {
                let text = String::from_utf8_lossy(bytes);
                let (mut flags, mut variables) = (Vec::new(), Vec::new());
                for (name, value) in text.lines().filter_map(|line| line.split_once('=')) {
                    let is_variable = name.starts_with("FOREBAY_") && name != CONFIG_VARIABLE;
                    if is_variable { &mut variables } else { &mut flags }.push((name.to_owned(), value.to_owned()));
                }
                let loaded = load(&Sources { flags, variables, ..Sources::default() });
                let loaded = loaded.map_err(|error| (format!("{:?}", error.kind()), error.hint_text().is_some()))?;
                let values = shown(&loaded.config);
                let flags = as_flags(&values);
                let again = load(&Sources { flags, ..Sources::default() }).expect("what is shown is read");
                assert_eq!(shown(&again.config), values, "what is shown is what is meant");
                Ok::<_, (String, bool)>(loaded.origins.len())
            });
        }
    }
}
