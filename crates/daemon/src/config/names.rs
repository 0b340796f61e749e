//! The names of keys, in files, flags and variables, and what somebody may have meant by a name that is none.

use forebay_core::{Error, Result};
use forebay_rpc::client::CONFIG_VARIABLE;

use super::{Key, keys};

const PREFIX: &str = "FOREBAY_";

/// Variables with our prefix that are no keys: they belong to clients, engines and the installation.
const RESERVED: [&str; 6] =
    [CONFIG_VARIABLE, "FOREBAY_BIN", "FOREBAY_DAEMON_UID", "FOREBAY_SOCKET", "FOREBAY_STRICT", "FOREBAY_STEP_STATS"];

pub(super) fn find(name: &str) -> Option<&'static Key> {
    keys().into_iter().find(|key| key.name == name)
}

/// The key that this variable sets.
pub(super) fn key_of(variable: &str) -> Option<&'static Key> {
    keys().into_iter().find(|key| key.variable() == variable)
}

/// Warnings of variables with our prefix that are nothing of ours. Errors for one that resembles a key.
pub fn check_names(variables: &[(String, String)]) -> Result<Vec<String>> {
    let is_unknown = |name: &str, text: &str| is_ours(name) && key_of(name).is_none() && !is_kubernetes(name, text);
    let unknown = variables.iter().filter(|(name, text)| is_unknown(name, text));
    unknown.map(|(name, _)| unknown_variable(name)).collect()
}

/// Of one name or more, each with its own hint.
pub(super) fn unknown_keys(names: &[&str]) -> Error {
    let hint = |name: &str| {
        key_hint(name, "").unwrap_or_else(|| "docs/config.md and `forebay serve --help` have all keys".to_owned())
    };
    let several = |name: &&str| format!("`{name}`: {}", hint(name));
    let (what, hint) = match names {
        [name] => ("key", hint(name)),
        _ => ("keys", names.iter().map(several).collect::<Vec<_>>().join("; ")),
    };
    let told: Vec<String> = names.iter().map(|name| format!("`{name}`")).collect();
    Error::invalid(format!("unknown {what} {}", told.join(", "))).hint(hint)
}

/// What to say of a name that is no key, if it resembles one; `dashes` stand before keys as they are written there.
/// Whoever names a section means a key of that section.
pub fn key_hint(name: &str, dashes: &str) -> Option<String> {
    let mean = |key: &str| format!("did you mean `{dashes}{key}`?");
    let parts = |key: &'static Key| key.name.rsplit_once('.').expect("a key is in a section");
    let named = name.rsplit_once('.').filter(|(section, _)| keys().into_iter().any(|key| parts(key).0 == *section));
    let Some((section, last)) = named else {
        return nearest(name, keys().into_iter().map(|key| key.name)).map(mean);
    };
    let own: Vec<&str> = keys().into_iter().map(parts).filter(|(of, _)| *of == section).map(|(_, last)| last).collect();
    Some(match nearest(last, own.iter().copied()) {
        Some(near) => mean(&format!("{section}.{near}")),
        None => format!("the keys of `{section}` are {}", own.join(", ")),
    })
}

/// Whether Kubernetes has set this variable, for a Service whose name is `forebay` or begins like that. It sets
/// `…_SERVICE_HOST`, `…_SERVICE_PORT`, `…_PORT` with an address, and `…_PORT_9477_TCP` with more behind it.
fn is_kubernetes(name: &str, value: &str) -> bool {
    let words: Vec<&str> = name.split('_').collect();
    let is_number = |word: &str| word.bytes().all(|byte| byte.is_ascii_digit());
    words.windows(2).any(|pair| match pair {
        ["SERVICE", "HOST" | "PORT"] => true,
        ["PORT", number] => is_number(number),
        [_, last] => *last == "PORT" && value.contains("://"),
        _ => false,
    })
}

fn is_ours(name: &str) -> bool {
    name.starts_with(PREFIX) && !RESERVED.contains(&name)
}

/// The warning about a variable that no key resembles. Errors for the others, with the nearest.
fn unknown_variable(name: &str) -> Result<String> {
    let known: Vec<String> = keys().into_iter().map(Key::variable).chain(RESERVED.map(str::to_string)).collect();
    let own = keys().into_iter().find(|key| key.usual_variable() == name).map(Key::variable);
    // The prefix makes no name nearer.
    let near = || nearest(&name[PREFIX.len()..], known.iter().map(|known| &known[PREFIX.len()..]));
    match own.or_else(|| Some(format!("{PREFIX}{}", near()?))) {
        Some(meant) => {
            Err(Error::invalid(format!("unknown variable `{name}`")).hint(format!("did you mean `{meant}`?")))
        }
        None => Ok(format!("the variable `{name}` names no key, so it has no effect; `forebay config` lists all keys")),
    }
}

/// The candidate that `word` was probably meant to be: one that it is a part of, or that is at most a third of
/// its letters away.
fn nearest<'a>(word: &str, candidates: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let last_part = |name: &str| name.rsplit('.').next().unwrap_or(name).to_string();
    candidates
        .map(|candidate| {
            let whole = distance(word, candidate);
            let part = distance(&last_part(word), &last_part(candidate));
            // A name without its unit.
            let is_cut_short = candidate.strip_prefix(word).is_some_and(|rest| rest.starts_with('_'));
            (if is_cut_short { 1 } else { whole.min(part + 1) }, candidate)
        })
        .filter(|(distance, candidate)| distance * 3 <= candidate.len().min(word.len()))
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, candidate)| candidate)
}

/// Letters to add, drop, replace or swap with their neighbour to get from `a` to `b`.
fn distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    let mut rows = vec![(0..=b.len()).collect::<Vec<usize>>()];
    for i in 1..=a.len() {
        let mut row = vec![i];
        for j in 1..=b.len() {
            let replace = rows[i - 1][j - 1] + usize::from(a[i - 1] != b[j - 1]);
            let mut best = replace.min(rows[i - 1][j] + 1).min(row[j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                best = best.min(rows[i - 2][j - 2] + 1);
            }
            row.push(best);
        }
        rows.push(row);
    }
    rows[a.len()][b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_suggested_for_a_word_from_elsewhere() {
        assert_eq!(nearest("banana", keys().into_iter().map(|key| key.name)), None);
        assert_eq!(nearest("", keys().into_iter().map(|key| key.name)), None);
    }

    #[test]
    fn a_swap_of_neighbours_counts_once() {
        assert_eq!(distance("pool", "polo"), 1);
        assert_eq!(distance("pool", ""), 4);
        assert_eq!(distance("pool.huge_pages", "pool.hugepages"), 1);
    }
}
