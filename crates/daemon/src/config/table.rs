//! The macro that turns a block of settings into a section: a struct, its defaults and its table of keys.

use std::fmt::Debug;

/// One key: what is known about it before anybody sets it.
pub struct Key {
    /// As in the file, such as `pool.capacity_bytes`; the flag is the same after two dashes.
    pub name: &'static str,
    /// What it does, and why the default is what it is; one entry a line of text.
    pub meaning: &'static [&'static str],
    /// What a value looks like, for people.
    pub kind: &'static str,
    /// Whether a value may hold a password.
    pub is_secret: bool,
    /// Whether a value is a path, or a list of them.
    pub is_path: bool,
    pub(crate) own_variable: Option<&'static str>,
    /// The default in words (markdown), where it depends on the user.
    pub default_text: Option<&'static str>,
}

impl Key {
    /// The environment variable that sets the key.
    pub fn variable(&self) -> String {
        match self.own_variable {
            Some(variable) => variable.to_string(),
            None => self.usual_variable(),
        }
    }

    /// The variable that would set a key that has none of its own.
    pub fn usual_variable(&self) -> String {
        format!("FOREBAY_{}", self.name.replace('.', "_").to_ascii_uppercase())
    }
}

/// A section, as [`settings!`] makes it.
pub trait Section: Debug + Send {
    /// As in the file, such as `pool` or `tier.ssd`.
    fn section(&self) -> &'static str;

    /// What it is about; one entry a line of text.
    fn about(&self) -> &'static [&'static str];

    fn keys(&self) -> &'static [Key];

    /// False if the key is not of this section, or the value does not fit.
    fn set(&mut self, key: &Key, value: &toml::Value) -> bool;

    /// The value as it would stand in the file; none if the key is not of this section, or not set.
    fn get(&self, key: &Key) -> Option<toml::Value>;
}

/// Makes a struct of each section. Its default is what runs when nothing is set.
macro_rules! settings {
    ($(
        $(#[doc = $about:literal])+
        $section:literal: $Section:ident {$(
            $(#[doc = $meaning:literal])+
            $key:ident: $Type:ty = $default:expr $(, shown $shown:literal)? $(, variable $variable:literal)?;
        )+}
    )+) => {$(
        $(#[doc = $about])+
        #[derive(Clone, Debug, PartialEq)]
        pub struct $Section {$(
            $(#[doc = $meaning])+
            pub $key: $Type,
        )+}

        impl Default for $Section {
            fn default() -> $Section {
                $Section { $( $key: $default, )+ }
            }
        }

        impl $crate::config::Section for $Section {
            fn section(&self) -> &'static str {
                $section
            }

            fn about(&self) -> &'static [&'static str] {
                &[$($about),+]
            }

            fn keys(&self) -> &'static [$crate::config::Key] {
                static KEYS: &[$crate::config::Key] = &[$(
                    $crate::config::Key {
                        name: concat!($section, ".", stringify!($key)),
                        meaning: &[$($meaning),+],
                        kind: <$Type as $crate::config::Setting>::KIND,
                        is_secret: <$Type as $crate::config::Setting>::IS_SECRET,
                        is_path: <$Type as $crate::config::Setting>::IS_PATH,
                        own_variable: $crate::config::only(&[$($variable)?]),
                        default_text: $crate::config::only(&[$($shown)?]),
                    },
                )+];
                KEYS
            }

            fn set(&mut self, key: &$crate::config::Key, value: &toml::Value) -> bool {
                $(
                    if key.name == concat!($section, ".", stringify!($key)) {
                        let read = $crate::config::Setting::read(value);
                        return read.map(|value| self.$key = value).is_some();
                    }
                )+
                false
            }

            fn get(&self, key: &$crate::config::Key) -> Option<toml::Value> {
                $(
                    if key.name == concat!($section, ".", stringify!($key)) {
                        return $crate::config::Setting::show(&self.$key);
                    }
                )+
                None
            }
        }
    )+};
}
pub(crate) use settings;

/// The one entry of an optional part of the macro.
pub(crate) const fn only(part: &'static [&'static str]) -> Option<&'static str> {
    if part.is_empty() { None } else { Some(part[0]) }
}
