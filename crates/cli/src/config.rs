//! `forebay config`: what is in effect, and who said so.
//!
//! The text is a configuration file again, with the origins as comments. It is printed also if `serve` would refuse it.

use forebay_daemon::config::{Key, Loaded, keys};
use serde_json::{Map, Value, json};

use crate::arguments::Config;
use crate::failure::Failure;
use crate::output::{print, print_json};

pub fn run(arguments: &Config) -> Result<(), Failure> {
    let loaded = arguments.settings.load()?;
    if arguments.json {
        let entry = |key: &Key| {
            let value = json!({"value": loaded.config.value(key), "origin": loaded.origin(key).to_string()});
            (key.name.to_string(), value)
        };
        print_json(&Value::Object(keys().into_iter().map(entry).collect::<Map<_, _>>()));
    } else {
        print(&text(&loaded));
    }
    loaded.config.check().map_err(Failure::Usage)
}

fn text(loaded: &Loaded) -> String {
    let assignment = |key: &Key| match loaded.config.value(key) {
        Some(value) => format!("{} = {value}", key.name),
        None => format!("# {} is not set", key.name),
    };
    let width = keys().into_iter().map(|key| assignment(key).len()).max().unwrap_or(0);
    keys().into_iter().map(|key| format!("{:<width$}  # {}\n", assignment(key), loaded.origin(key))).collect()
}
