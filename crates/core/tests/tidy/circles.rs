//! Circles of files: a file that needs another which needs the first cannot be read, moved or tested alone.
//!
//! An arrow is a path in a `use`, from its file to the file that defines what is named. `mod` lines and re-exports are
//! no arrows; a name that is re-exported leads to where it comes from. Tests are left out.

use std::collections::{BTreeMap, BTreeSet};

use crate::Source;

type Module = Vec<String>;

/// What a `use` names: the segments of the path, and the name it gets here.
#[derive(Clone, PartialEq, Debug)]
struct Use {
    path: Vec<String>,
    name: String,
    is_public: bool,
}

/// The modules of one crate, each with its `use`s.
struct Crate(BTreeMap<Module, Vec<Use>>);

impl Crate {
    fn of(name: &str, sources: &[Source]) -> Crate {
        let folder = format!("crates/{name}/src/");
        let modules = sources.iter().filter_map(|source| {
            let module = module(source.path.strip_prefix(&folder)?);
            (!module.iter().any(|part| part == "tests")).then(|| (module, uses(&source.code)))
        });
        Crate(modules.collect())
    }

    /// The module that defines what `path` names when it stands in `from`; none if that is another crate.
    fn target(&self, from: &Module, path: &[String], depth: usize) -> Option<Module> {
        let mut at = match path.first()?.as_str() {
            "crate" => Module::new(),
            "self" => from.clone(),
            "super" => from[..from.len().checked_sub(1)?].to_vec(),
            child => self.child(from, child)?,
        };
        for (index, part) in path.iter().enumerate().skip(1) {
            if part == "super" {
                at.pop();
            } else if let Some(child) = self.child(&at, part) {
                at = child;
            } else {
                let from_there = self.0[&at].iter().filter(|other| other.is_public && depth < 8);
                let there = from_there.filter(|other| other.name == *part || other.name == "*").find_map(|other| {
                    let whole = [&other.path[..], &path[index + 1..]].concat();
                    self.target(&at, &whole, depth + 1).filter(|found| other.name != "*" || *found != at)
                });
                return Some(there.unwrap_or(at));
            }
        }
        Some(at)
    }

    fn child(&self, of: &Module, name: &str) -> Option<Module> {
        let child = [&of[..], &[name.to_owned()]].concat();
        self.0.contains_key(&child).then_some(child)
    }

    fn arrows(&self) -> BTreeSet<(Module, Module)> {
        let of = |(from, uses): (&Module, &Vec<Use>)| {
            let targets = uses.iter().filter(|one| !one.is_public).filter_map(|one| self.target(from, &one.path, 0));
            targets.filter(|to| to != from).map(|to| (from.clone(), to)).collect::<Vec<_>>()
        };
        self.0.iter().flat_map(of).collect()
    }

    /// Modules that reach each other, the largest circle first.
    fn circles(&self) -> Vec<Vec<Module>> {
        let arrows = self.arrows();
        let reach = |from: &Module| {
            let (mut seen, mut next) = (BTreeSet::new(), vec![from]);
            while let Some(at) = next.pop() {
                let to = arrows.iter().filter(|(tail, _)| tail == at).map(|(_, head)| head);
                next.extend(to.filter(|head| seen.insert((*head).clone())));
            }
            seen
        };
        let reached: BTreeMap<&Module, BTreeSet<Module>> =
            self.0.keys().map(|module| (module, reach(module))).collect();
        let circle = |module: &Module| -> Vec<Module> {
            let others = reached[module].iter().filter(|other| reached[other].contains(module));
            others.cloned().collect()
        };
        let mut circles: Vec<Vec<Module>> = self.0.keys().map(circle).filter(|circle| circle.len() > 1).collect();
        circles.sort_by_key(|circle| (std::cmp::Reverse(circle.len()), circle.clone()));
        circles.dedup();
        circles
    }
}

/// `a/b.rs` and `a/b/mod.rs` are `a::b`.
fn module(file: &str) -> Module {
    let parts = file.trim_end_matches(".rs").split('/').map(str::to_owned);
    let mut parts: Module = parts.collect();
    parts.pop_if(|last| ["mod", "lib", "main"].contains(&last.as_str()));
    parts
}

/// All `use`s of a file up to its tests.
fn uses(code: &str) -> Vec<Use> {
    let code = code.split("#[cfg(test)]\nmod tests {").next().unwrap_or("");
    let mut found = Vec::new();
    let mut lines = code.lines();
    while let Some(line) = lines.next() {
        let line = line.trim_start();
        let (is_public, rest) = match line.strip_prefix("pub") {
            Some(rest) => (true, rest.split_once(' ').map_or("", |(_, rest)| rest)),
            None => (false, line),
        };
        let Some(rest) = rest.strip_prefix("use ") else { continue };
        let mut statement = rest.to_owned();
        while !statement.contains(';') {
            let Some(more) = lines.next() else { break };
            statement.push_str(more.trim());
        }
        let tree = statement.split(';').next().unwrap_or("");
        leaves(&[], tree, &mut |path, name| found.push(Use { path, name, is_public }));
    }
    found
}

/// Each path of a tree with braces, and the name that it gives.
fn leaves(prefix: &[String], tree: &str, leaf: &mut dyn FnMut(Vec<String>, String)) {
    let tree = tree.trim();
    let Some((head, branches)) = tree.split_once('{') else {
        let (path, alias) = tree.split_once(" as ").map_or((tree, None), |(path, alias)| (path, Some(alias)));
        let mut path = [prefix, &path.split("::").map(|part| part.trim().to_owned()).collect::<Vec<_>>()].concat();
        // `a::{self}` is `a`.
        path.pop_if(|last| last == "self" && !prefix.is_empty());
        let name = alias.map(str::to_owned).or_else(|| path.last().cloned());
        return name.into_iter().for_each(|name| leaf(path.clone(), name));
    };
    let head = head.trim_end_matches("::").split("::").map(str::trim).filter(|part| !part.is_empty());
    let prefix = [prefix, &head.map(str::to_owned).collect::<Vec<_>>()].concat();
    let branches = branches.rsplit_once('}').map_or(branches, |(inside, _)| inside);
    let (mut depth, mut from) = (0, 0);
    for (at, c) in branches.char_indices().chain([(branches.len(), ',')]) {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                let branch = branches[from..at].trim();
                if !branch.is_empty() {
                    leaves(&prefix, branch, leaf);
                }
                from = at + 1;
            }
            _ => {}
        }
    }
}

fn named(module: &Module) -> String {
    if module.is_empty() { "crate".to_owned() } else { module.join("::") }
}

#[test]
fn uses_are_read_as_the_compiler_reads_them() {
    let code = "use a::{self, b as c, d::{e, f}};\npub(crate) use super::g::*;\nfn h() {\n    use crate::i;\n}\n";
    let path = |words: &str| words.split("::").map(str::to_owned).collect::<Vec<_>>();
    let found = uses(code).into_iter().map(|one| (one.path, one.name, one.is_public)).collect::<Vec<_>>();
    let wanted = [
        ("a", "a", false),
        ("a::b", "c", false),
        ("a::d::e", "e", false),
        ("a::d::f", "f", false),
        ("super::g::*", "*", true),
        ("crate::i", "i", false),
    ];
    assert_eq!(found, wanted.map(|(words, name, is_public)| (path(words), name.to_owned(), is_public)));
}

#[test]
fn a_circle_is_found_through_a_re_export() {
    let source = |path: &str, code: &str| Source {
        path: format!("crates/x/src/{path}"),
        text: String::new(),
        code: code.to_owned(),
    };
    let sources = [
        source("lib.rs", "mod a;\nmod b;\nmod c;\npub use a::A;\n"),
        source("a.rs", "use crate::b::B;\n"),
        source("b/mod.rs", "use std::fmt;\nuse super::c;\n"),
        source("c.rs", "use crate::A;\n"),
        source("d.rs", "use crate::c::C;\nuse crate::A;\n"),
    ];
    let circles = Crate::of("x", &sources).circles();
    assert_eq!(circles, [["a", "b", "c"].map(|name| vec![name.to_owned()])]);
}

#[test]
fn no_circle_is_longer_than_two_files() {
    let sources = crate::sources(&[".rs"]);
    let crates: BTreeSet<&str> = sources.iter().filter_map(|source| source.path.split('/').nth(1)).collect();
    for name in crates {
        let circles = Crate::of(name, &sources).circles();
        let long = circles.iter().filter(|circle| circle.len() > 2);
        let told: Vec<String> = long.map(|circle| circle.iter().map(named).collect::<Vec<_>>().join(", ")).collect();
        assert!(told.is_empty(), "circles of files in `{name}`:\n{}", told.join("\n"));
    }
}
