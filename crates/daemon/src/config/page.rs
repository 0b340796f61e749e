//! docs/config.md, written from the table of keys.

use super::{Config, KEYS, Key, SECTIONS};

const HEAD: &str = "\
# Configuration

The configuration is one TOML file, named with `--config FILE` or `FOREBAY_CONFIG`. Every key is also a flag
(`--pool.capacity_bytes 8GiB`) and a variable (`FOREBAY_POOL_CAPACITY_BYTES=8GiB`). Values are written as in the file;
text needs no quotes. A flag beats a variable, a variable beats the file, the file beats the default. An unknown key is
an error that suggests the nearest one. `forebay config` prints the effective values as such a file, and where each came
from.

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
    let mut page = HEAD.to_string();
    for (section, about) in SECTIONS {
        page += &format!("\n## {section}\n\n{}\n", paragraph(about));
        let prefix = format!("{section}.");
        for key in KEYS.iter().filter(|key| key.name.starts_with(&prefix)) {
            page += &entry(key);
        }
    }
    page
}

fn entry(key: &Key) -> String {
    let Key { name, kind, meaning, .. } = key;
    let meaning = paragraph(meaning);
    format!("\n### `{name}`\n\n{meaning}\n\n- {kind}\n- default: {}\n- variable: `{}`\n", default(key), key.variable())
}

fn default(key: &Key) -> String {
    match (key.default_text, key.value(&Config::default())) {
        (Some(text), _) => text.to_string(),
        (None, Some(value)) => format!("`{value}`"),
        (None, None) => "not set".to_string(),
    }
}

/// Doc comments come as lines that begin with a space.
fn paragraph(lines: &[&str]) -> String {
    lines.iter().map(|line| line.trim()).collect::<Vec<_>>().join("\n")
}
