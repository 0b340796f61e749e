//! STYLE.md speaks of this code: a path that is named exists. A word of docs/glossary.md is a word of the code.

use std::collections::BTreeSet;

use crate::{has_word, root, sources};

fn page(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// What stands in backticks, and what links lead to.
fn quoted(text: &str) -> Vec<&str> {
    let inside = text.split('`').skip(1).step_by(2);
    let links = text.split("](").skip(1).filter_map(|rest| rest.split(')').next());
    inside.chain(links).collect()
}

/// A file or folder by how it is written: no blanks or signs of code, and an ending or a slash.
fn is_path(word: &str) -> bool {
    let is_plain = |c: char| c.is_alphanumeric() || "./_-".contains(c);
    let endings = [".rs", ".py", ".pyi", ".md", ".sh", ".toml", ".proto", "/"];
    word.chars().all(is_plain) && word.len() > 3 && endings.iter().any(|ending| word.ends_with(ending))
}

#[test]
fn paths_that_the_page_names_exist() {
    let page = page("STYLE.md");
    let all = sources(&[".rs", ".py", ".pyi", ".md", ".sh", ".toml", ".proto"]);
    let exists = |path: &str| {
        root().join(path).exists()
            || all.iter().any(|source| source.path.strip_suffix(path).is_some_and(|before| before.ends_with('/')))
    };
    let missing = quoted(&page).into_iter().filter(|word| is_path(word) && !exists(word));
    let missing: BTreeSet<&str> = missing.collect();
    assert!(missing.is_empty(), "STYLE.md names what is not there: {missing:?}");
}

#[test]
fn words_of_the_glossary_occur_in_the_code() {
    let glossary = page("docs/glossary.md");
    let rows = glossary.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| word "));
    let cells = rows.filter_map(|row| row.split('|').nth(1));
    let words: Vec<&str> = cells.flat_map(|cell| cell.split([',', '/'])).map(str::trim).collect();
    assert!(words.len() > 30, "only {} words were found", words.len());
    let all = sources(&[".rs", ".py", ".proto"]);
    // Names, not comments: a word that only comments use is not what a thing is called.
    let code: Vec<String> =
        all.iter().filter(|source| !source.path.contains("tests/")).map(|s| parts(&s.code)).collect();
    let occurs = |word: &str| {
        let phrase = word.trim_matches('`').to_lowercase().replace(['-', '_'], " ");
        [phrase.clone(), format!("{phrase}s")].iter().any(|phrase| code.iter().any(|text| has_word(text, phrase)))
    };
    let missing: BTreeSet<&str> = words.into_iter().filter(|word| !occurs(word)).collect();
    assert!(missing.is_empty(), "the glossary has words that the code has not: {missing:?}");
}

/// `PrefixHit`, `prefix_hit` and `PREFIX_HIT` as `prefix hit`.
fn parts(code: &str) -> String {
    let mut text = String::with_capacity(code.len());
    let mut before = ' ';
    for c in code.chars() {
        if c.is_uppercase() && before.is_lowercase() {
            text.push(' ');
        }
        text.extend(if c == '_' { ' ' } else { c }.to_lowercase());
        before = c;
    }
    text
}
