//! Which files and directories are trusted, decided from the result of `fstat`.
//!
//! Invariant: a file is trusted if only root and the trusted users could have made it and can change it. So a directory
//! is trusted only if all directories above it are, because a user who may rename one of those can put another in its
//! place. Access lists need no extra check: they grant no more than the group bits of the mode show.

use std::path::Path;

use crate::{Error, Result};

/// Who owns a file or directory, and who may do what with it.
#[derive(Clone, Copy, Debug)]
pub struct Facts {
    /// The owner's user id.
    pub uid: u32,
    /// With the bits that say what it is.
    pub mode: u32,
    /// Names that it has.
    pub links: u64,
}

/// What it is used as.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role {
    /// A file that is read and written.
    File,
    /// A directory that such files or sockets are found in by name.
    Directory,
    /// A directory somewhere above that one.
    Above,
}

/// The users that are believed: root, the process's own, and perhaps one that was named.
#[derive(Clone, Copy, Debug)]
pub struct Trust {
    /// The effective user id of this process.
    pub own: u32,
    /// One more user id that is believed, if somebody named one.
    pub named: Option<u32>,
    /// The end of a hint: what to do if somebody else is right after all.
    pub remedy: &'static str,
}

const KIND: u32 = 0o170_000;
const DIRECTORY: u32 = 0o040_000;
const FILE: u32 = 0o100_000;
const LINK: u32 = 0o120_000;
const OTHERS_WRITE: u32 = 0o022;
const STICKY: u32 = 0o1000;

impl Trust {
    /// Errors with `Invalid` and a hint where the user is not believed.
    pub fn check_user(self, uid: u32, what: &str) -> Result<()> {
        if uid == 0 || uid == self.own || Some(uid) == self.named {
            return Ok(());
        }
        Err(Error::invalid(format!("{what} belongs to user {uid}"))
            .hint(format!("use one that root or this user made; if user {uid} is right, {}", self.remedy)))
    }

    /// Checks the file or directory at `real`, a path without symbolic links above its last part, and all directories
    /// above it. It goes from the root down, so that nobody can replace what was already checked. `look` follows no
    /// link. Errors as [`Trust::check`], or as `look` does.
    pub fn check_path(self, role: Role, real: &Path, look: impl Fn(&Path) -> Result<Facts>) -> Result<()> {
        let mut down: Vec<&Path> = real.ancestors().collect();
        down.reverse();
        down.into_iter().try_for_each(|path| {
            let role = if path == real { role } else { Role::Above };
            let checked = look(path).and_then(|facts| self.check(role, path, facts));
            checked.map_err(|error| error.with("path", path.display()))
        })
    }

    /// Errors with `Invalid`, the reason and a hint, if another user could have made it or can change it. `path` is for
    /// the hint.
    pub fn check(self, role: Role, path: &Path, facts: Facts) -> Result<()> {
        let Facts { uid, mode, links } = facts;
        let (what, kind) = match role {
            Role::File => ("the file", FILE),
            Role::Directory => ("the directory", DIRECTORY),
            Role::Above => ("a directory above it", DIRECTORY),
        };
        if mode & KIND != kind {
            let (is, hint) = match (mode & KIND == LINK, role) {
                (true, _) => {
                    let real = format!("`readlink -f {}` prints it", path.display());
                    ("a symbolic link", format!("write the path without symbolic links: {real}"))
                }
                (false, Role::File) => ("not a regular file", "name a file".to_string()),
                (false, Role::Directory | Role::Above) => ("not a directory", "name a directory".to_string()),
            };
            return Err(Error::invalid(format!("{what} is {is}")).hint(hint));
        }
        self.check_user(uid, what)?;
        // In a directory to which others may only add names, existing names stay. That is enough for a directory above,
        // but not for one in which names are looked up.
        if mode & OTHERS_WRITE != 0 && !(role == Role::Above && mode & STICKY != 0) {
            return Err(Error::invalid(format!("others may write to {what}"))
                .with("mode", format!("{:o}", mode & 0o7777))
                .hint(own_instead(role, path, mode)));
        }
        if role == Role::File && links > 1 {
            return Err(Error::invalid(format!("{what} has another hard link, through which it may be changed"))
                .hint("remove the other hard link, or this one"));
        }
        Ok(())
    }
}

/// The hint for a place that others may write to. It never advises to take a directory away from the users who share
/// it.
fn own_instead(role: Role, path: &Path, mode: u32) -> String {
    match role {
        Role::Directory if mode & STICKY != 0 => {
            let example = path.join("forebay");
            format!("it is for everybody: name a directory of your own in it, such as `{}`", example.display())
        }
        Role::Above => "use a place below directories that only root or this user may write to".to_string(),
        Role::File | Role::Directory => format!("run `chmod go-w {}`, or use another", path.display()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_is_told_to_take_a_directory_from_all_who_share_it() {
        let root = Trust { own: 0, named: None, remedy: "" };
        let path = Path::new("/tmp");
        // (what for, mode, what the hint says)
        let cases = [
            (
                Role::Directory,
                0o41777,
                "it is for everybody: name a directory of your own in it, such as `/tmp/forebay`",
            ),
            (Role::Directory, 0o40777, "run `chmod go-w /tmp`, or use another"),
            (Role::File, 0o100666, "run `chmod go-w /tmp`, or use another"),
            (Role::Above, 0o40777, "use a place below directories that only root or this user may write to"),
            (Role::Directory, 0o100644, "name a directory"),
            (Role::Above, 0o100644, "name a directory"),
            (Role::File, 0o40755, "name a file"),
            (Role::Directory, 0o120777, "write the path without symbolic links: `readlink -f /tmp` prints it"),
        ];
        for (role, mode, hint) in cases {
            let error = root.check(role, path, Facts { uid: 0, mode, links: 1 }).unwrap_err();
            assert_eq!(error.hint_text(), Some(hint), "{role:?} {mode:o}");
        }
    }

    #[test]
    fn only_what_root_and_trusted_users_can_make_and_change_is_believed() {
        use Role::*;
        let user = Trust { own: 1000, named: None, remedy: "" };
        let naming = Trust { named: Some(7), ..user };
        let root = Trust { own: 0, ..user };
        // (who asks, what for, owner, mode, names, whether it is believed)
        let cases = [
            (user, Directory, 1000, 0o40700, 2, true),
            (user, Directory, 0, 0o40755, 9, true),
            (user, Directory, 1001, 0o40700, 2, false),
            (user, Directory, 7, 0o40700, 2, false),
            (naming, Directory, 7, 0o40755, 2, true),
            (naming, Directory, 8, 0o40755, 2, false),
            (root, Directory, 1000, 0o40700, 2, false),
            (root, Directory, 0, 0o42755, 2, true),
            (root, Directory, 0, 0o40775, 2, false),
            (root, Directory, 0, 0o40757, 2, false),
            (root, Directory, 0, 0o41777, 2, false),
            (root, Above, 0, 0o41777, 2, true),
            (root, Above, 0, 0o40777, 2, false),
            (root, Above, 1000, 0o41777, 2, false),
            (user, Above, 1001, 0o40755, 2, false),
            (user, Directory, 1000, 0o120777, 1, false),
            (user, Directory, 1000, 0o100600, 1, false),
            (user, File, 1000, 0o40700, 1, false),
            (user, File, 1000, 0o100600, 1, true),
            (user, File, 0, 0o100644, 1, true),
            (user, File, 1000, 0o100660, 1, false),
            (user, File, 1000, 0o101602, 1, false),
            (user, File, 1000, 0o100600, 2, false),
            (user, File, 1001, 0o100600, 1, false),
        ];
        for (trust, role, uid, mode, links, is_believed) in cases {
            let checked = trust.check(role, Path::new("/x"), Facts { uid, mode, links });
            assert_eq!(checked.is_ok(), is_believed, "{trust:?} {role:?} of {uid}, {mode:o}, {links}: {checked:?}");
            assert!(checked.err().is_none_or(|error| error.hint_text().is_some()));
        }
    }
}
