//! The macro that turns one block of settings into the struct, its defaults and the table of keys.

use super::Config;

/// One key: what is known about it before anybody sets it.
pub struct Key {
    /// As in the file, such as `pool.capacity_bytes`; the flag is the same after two dashes.
    pub name: &'static str,
    /// What it does, and why the default is what it is; one entry a line of text.
    pub meaning: &'static [&'static str],
    /// What a value looks like, for people.
    pub kind: &'static str,
    pub(super) own_variable: Option<&'static str>,
    /// The default in words (markdown), where it depends on the user.
    pub default_text: Option<&'static str>,
    /// False if the value does not fit.
    pub(super) set: fn(&mut Config, &toml::Value) -> bool,
    pub(super) get: fn(&Config) -> Option<toml::Value>,
}

impl Key {
    /// The environment variable that sets the key.
    pub fn variable(&self) -> String {
        match self.own_variable {
            Some(variable) => variable.to_string(),
            None => format!("FOREBAY_{}", self.name.replace('.', "_").to_ascii_uppercase()),
        }
    }

    /// The value in `config` as it would stand in the file; none if it is not set.
    pub fn value(&self, config: &Config) -> Option<toml::Value> {
        (self.get)(config)
    }
}

macro_rules! settings {
    ($(
        $(#[doc = $about:literal])+
        $section:ident: $Section:ident {$(
            $(#[doc = $meaning:literal])+
            $key:ident: $Type:ty = $default:expr $(, shown $shown:literal)? $(, variable $variable:literal)?;
        )+}
    )+) => {
        /// See the module's head. `Config::default()` is what runs when nothing is set.
        #[derive(Clone, Debug, PartialEq)]
        pub struct Config {$(
            $(#[doc = $about])+
            pub $section: $Section,
        )+}

        $(
            $(#[doc = $about])+
            #[derive(Clone, Debug, PartialEq)]
            pub struct $Section {$(
                $(#[doc = $meaning])+
                pub $key: $Type,
            )+}
        )+

        impl Default for Config {
            fn default() -> Config {
                Config { $( $section: $Section { $( $key: $default, )+ }, )+ }
            }
        }

        /// The sections and what each is about, in the struct's order.
        static SECTIONS: &[(&str, &[&str])] = &[$( (table::section!($section), &[$($about),+]), )+];

        /// Every key, in the struct's order.
        pub static KEYS: &[Key] = &[$($(
            Key {
                name: concat!(table::section!($section), ".", stringify!($key)),
                meaning: &[$($meaning),+],
                kind: <$Type as value::Setting>::KIND,
                own_variable: table::only(&[$($variable)?]),
                default_text: table::only(&[$($shown)?]),
                set: |config, value| match value::Setting::read(value) {
                    Some(value) => { config.$section.$key = value; true }
                    None => false,
                },
                get: |config| value::Setting::show(&config.$section.$key),
            },
        )+)+];
    };
}
pub(super) use settings;

/// A section as it stands in the file: that of a tier is a table in a table.
macro_rules! section {
    (tier_ssd) => {
        "tier.ssd"
    };
    (tier_fs) => {
        "tier.fs"
    };
    (tier_object) => {
        "tier.object"
    };
    (tier_redis) => {
        "tier.redis"
    };
    ($section:ident) => {
        stringify!($section)
    };
}
pub(super) use section;

/// The one entry of an optional part of the macro.
pub(super) const fn only(part: &'static [&'static str]) -> Option<&'static str> {
    if part.is_empty() { None } else { Some(part[0]) }
}
