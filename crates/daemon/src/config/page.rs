//! docs/config.md, written from the table of keys.

use super::{Config, Key};

const HEAD: &str = "\
# Configuration

The configuration is one TOML file, named with `--config FILE` or `FOREBAY_CONFIG`. If neither names one,
`/etc/forebay.toml` is read if it is there; an empty `FOREBAY_CONFIG` means no file. It is an error if the file exists
but cannot be read (a symbolic link to nothing, for example), or is not a regular file. Every key is also a flag
(`--pool.capacity_bytes 8GiB`) and a variable (`FOREBAY_POOL_CAPACITY_BYTES=8GiB`). Values are written as in the file;
text needs no quotes. A flag beats a variable, a variable beats the file, the file beats the default. An unknown key is
an error that suggests the nearest one. A path in the file or in a variable begins with `/`; a relative path in a flag
begins at the directory where the command is run. `forebay config` prints the effective values in the form of such a
file, and where each value came from. Clients read `socket.directory` from the same file
([engines.md](engines.md#where-clients-look-for-the-daemon)). An empty `FOREBAY_SOCKET_DIRECTORY` counts as not set.

This page is generated from the code. To regenerate it:
`FOREBAY_UPDATE_GOLDEN=1 cargo test -p forebay-daemon --test pages`.

```toml
[pool]
capacity_bytes = \"64GiB\"
huge_pages = \"require\"

[socket]
allow_uids = [1000]
```
";

/// The whole page.
pub fn page() -> String {
    let (mut page, defaults) = (HEAD.to_string(), Config::default());
    for section in defaults.sections() {
        page += &format!("\n## {}\n\n{}\n", section.section(), paragraph(section.about()));
        section.keys().iter().for_each(|key| page += &entry(key, &defaults));
    }
    page
}

fn entry(key: &Key, defaults: &Config) -> String {
    let Key { name, kind, meaning, .. } = key;
    let (meaning, default) = (paragraph(meaning), default(key, defaults));
    format!("\n### `{name}`\n\n{meaning}\n\n- {kind}\n- default: {default}\n- variable: `{}`\n", key.variable())
}

fn default(key: &Key, defaults: &Config) -> String {
    match (key.default_text, defaults.value(key)) {
        (Some(text), _) => text.to_string(),
        (None, Some(value)) => format!("`{value}`"),
        (None, None) => "not set".to_string(),
    }
}

/// Doc comments come as lines that begin with a space.
fn paragraph(lines: &[&str]) -> String {
    lines.iter().map(|line| line.trim()).collect::<Vec<_>>().join("\n")
}
