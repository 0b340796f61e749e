//! The daemon's keys as flags, and the way from flags, environment and file to a configuration.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Arg, ArgMatches, Args, Command, FromArgMatches};
use forebay_daemon::config::{Config, Key, Loaded, Origin, Sources, check_names, keys, load};
use forebay_rpc::client::{USUAL_CONFIG, find_sockets, look_for_sockets, sockets_of_variables, usual_sockets};

use crate::failure::{self, Failure};

/// `--config` and one flag for each key, named as in the file.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    file: Option<PathBuf>,
    flags: Vec<(String, String)>,
}

impl Settings {
    /// Without flags.
    pub fn of_file(file: Option<PathBuf>) -> Settings {
        Settings { file, flags: Vec::new() }
    }

    /// What is in effect, with its warnings told.
    pub fn load(&self) -> Result<Loaded, Failure> {
        let loaded = self.read()?;
        loaded.warnings.iter().for_each(|warning| failure::warn(warning));
        Ok(loaded)
    }

    /// What is in effect. Everything wrong with it is the user's to mend, hence a usage failure.
    pub fn read(&self) -> Result<Loaded, Failure> {
        let usual_file = Some(PathBuf::from(USUAL_CONFIG));
        let (file, flags) = (self.file.clone(), self.flags.clone());
        let sources = Sources { file, usual_file, variables: variables(), flags };
        load(&sources).map_err(Failure::Usage)
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
        let Some(file) = &self.config else {
            if let Some(directory) = sockets_of_variables() {
                return Ok(directory);
            }
            // A misspelt variable may have been meant to say where the daemon is. The rest is the daemon's to judge.
            check_names(&variables()).map_err(Failure::Usage)?.iter().for_each(|warning| failure::warn(warning));
            let (directory, passed_over) = look_for_sockets();
            if let Some(why) = passed_over {
                failure::warn(&format!("{why}; this file is ignored"));
            }
            return Ok(directory);
        };
        // A file that the user named: what is wrong with it is an error, and its directory stands before the variables.
        let loaded = Settings::of_file(Some(file.clone())).load()?;
        let is_in_a_file = |key: &&Key| matches!(loaded.origin(key), Origin::File(_));
        let named = keys().into_iter().filter(|key| key.name == "socket.directory").find(is_in_a_file);
        let others = || sockets_of_variables().unwrap_or_else(usual_sockets);
        Ok(named.map_or_else(others, |_| loaded.config.socket.directory.clone()))
    }
}

/// Of the environment.
fn variables() -> Vec<(String, String)> {
    let text = |text: OsString| text.to_string_lossy().into_owned();
    std::env::vars_os().map(|(name, value)| (text(name), text(value))).collect()
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
            .help("TOML file with any of the keys below; FOREBAY_CONFIG can name it too [default: /etc/forebay.toml, if it is there]");
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
        // No key takes one: the key says what it takes.
        .allow_negative_numbers(true)
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
