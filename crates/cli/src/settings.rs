//! The daemon's keys as flags, and the way from flags, environment and file to a configuration.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Arg, ArgMatches, Args, Command, FromArgMatches};
use forebay_daemon::config::{Config, Key, Loaded, Origin, Sources, keys, load};
use forebay_rpc::client::{find_sockets, sockets_of_variables};

use crate::failure::{self, Failure};

/// `--config` and one flag for each key, named as in the file.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    file: Option<PathBuf>,
    flags: Vec<(String, String)>,
}

impl Settings {
    /// What is in effect. Everything wrong with it is the user's to mend, hence a usage failure.
    pub fn load(&self) -> Result<Loaded, Failure> {
        let text = |text: OsString| text.to_string_lossy().into_owned();
        let variables = std::env::vars_os().map(|(name, value)| (text(name), text(value))).collect();
        let sources = Sources { file: self.file.clone(), variables, flags: self.flags.clone() };
        let loaded = load(&sources).map_err(Failure::Usage)?;
        loaded.warnings.iter().for_each(|warning| failure::say(format!("warning: {warning}\n")));
        Ok(loaded)
    }
}

/// Where a running daemon is found: what commands that only talk to it need of its settings.
#[derive(Args, Clone, Debug)]
pub struct Daemon {
    /// Configuration file of the daemon
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Directory of the daemon's sockets
    #[arg(long = "socket.directory", value_name = "PATH")]
    socket_directory: Option<String>,
}

impl Daemon {
    pub fn socket_directory(&self) -> Result<PathBuf, Failure> {
        if let Some(named) = &self.socket_directory {
            return Ok(find_sockets(Some(named)));
        }
        // A file that only a variable or nobody names stands behind the variables that clients have of their own.
        if let (None, Some(directory)) = (&self.config, sockets_of_variables()) {
            return Ok(directory);
        }
        let loaded = Settings { file: self.config.clone(), flags: Vec::new() }.load()?;
        let is_in_a_file = |key: &&Key| matches!(loaded.origin(key), Origin::File(_));
        let named = keys().into_iter().filter(|key| key.name == "socket.directory").find(is_in_a_file);
        Ok(named.map_or_else(|| find_sockets(None), |_| loaded.config.socket.directory.clone()))
    }
}

impl FromArgMatches for Settings {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Settings, clap::Error> {
        let mut settings = Settings::default();
        settings.update_from_arg_matches(matches)?;
        Ok(settings)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        self.file = matches.get_one::<PathBuf>("config").cloned();
        let flag = |key: &Key| Some((key.name.to_string(), matches.get_one::<String>(key.name)?.clone()));
        self.flags = keys().into_iter().filter_map(flag).collect();
        Ok(())
    }
}

impl Args for Settings {
    fn augment_args(command: Command) -> Command {
        let file = Arg::new("config")
            .long("config")
            .value_name("FILE")
            .value_parser(clap::value_parser!(PathBuf))
            .help("TOML file with any of the keys below; FOREBAY_CONFIG can name it too");
        let defaults = Config::default();
        keys().into_iter().map(|key| flag(key, &defaults)).fold(command.arg(file), Command::arg)
    }

    fn augment_args_for_update(command: Command) -> Command {
        Settings::augment_args(command)
    }
}

fn flag(key: &'static Key, defaults: &Config) -> Arg {
    let section = key.name.split('.').next().unwrap_or_default();
    let default = defaults.value(key).map_or("not set".to_string(), |value| value.to_string());
    let default = key.default_text.map_or(default, |text| text.replace('`', ""));
    Arg::new(key.name)
        .long(key.name)
        .value_name("VALUE")
        // As with variables and the file: the last word counts.
        .overrides_with(key.name)
        .help_heading(section)
        .help(format!("{} [default: {default}]", first_sentence(key)))
        .hide_default_value(true)
}

/// The rest is in docs/config.md.
fn first_sentence(key: &Key) -> String {
    let text = key.meaning.iter().map(|line| line.trim()).collect::<Vec<_>>().join(" ");
    let end = text.find(". ").unwrap_or(text.len());
    text[..end].trim_end_matches('.').to_string()
}
