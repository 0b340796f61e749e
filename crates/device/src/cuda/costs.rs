//! What copies cost by each method, which of them that makes the best for a job, and the file that keeps it.
//!
//! Invariants: a file counts only for the device, driver and version that it was measured with, whole, and if nobody
//! but root and this user could have written it; with any other the costs are measured again. A file chooses between
//! methods that were tested, and does nothing else.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use forebay_core::checksum::checksum;
use forebay_core::trust::{Facts, Role, Trust};

use super::methods::Method;
use crate::job::Direction;

const HEAD: &str = "forebay: costs of GPU copies, format 1";
/// Of a file: many times what one has.
const MOST_BYTES: u64 = 64 << 10;
/// The kernel takes multiprocessors from the model, so it has to be as many times faster than the driver's own copies.
const WORTH: (u64, u64) = (3, 2);

/// How long so many copies of this size have taken together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Cost {
    pub direction: Direction,
    pub method: Method,
    pub bytes: u64,
    pub count: u64,
    pub nanoseconds: u64,
}

#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Costs(pub Vec<Cost>);

impl Costs {
    /// The best of these methods for `count` copies of about `bytes`; none if nothing like it was measured.
    pub fn best(&self, direction: Direction, bytes: u64, count: u64, among: &[Method]) -> Option<Method> {
        // How often one has to be doubled to become the other.
        let apart = |one: u64, other: u64| (one.max(1) as f64 / other.max(1) as f64).log2().abs();
        let far = |cost: &Cost| apart(cost.bytes, bytes) + apart(cost.count, count);
        let measured = || self.0.iter().filter(|cost| cost.direction == direction && among.contains(&cost.method));
        let nearest = measured().min_by(|one, other| far(one).total_cmp(&far(other)))?;
        let here = || measured().filter(|cost| (cost.bytes, cost.count) == (nearest.bytes, nearest.count));
        let own = here().filter(|cost| cost.method != Method::Kernel).min_by_key(|cost| cost.nanoseconds);
        let is_worth = |cost: &&Cost| {
            let worth = cost.nanoseconds.saturating_mul(WORTH.0);
            cost.method == Method::Kernel && own.is_none_or(|own| worth <= own.nanoseconds.saturating_mul(WORTH.1))
        };
        here().find(is_worth).or(own).map(|cost| cost.method)
    }

    /// What a file says of `what`. None if there is none that counts.
    pub fn read(place: &Path, what: &str) -> Option<Costs> {
        let mut options = OpenOptions::new();
        let mut file = options.read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(place).ok()?;
        let found = file.metadata().ok()?;
        let facts = Facts { uid: found.uid(), mode: found.mode(), links: found.nlink() };
        let own = rustix::process::geteuid().as_raw();
        Trust { own, named: None, remedy: "remove it" }.check(Role::File, place, facts).ok()?;
        let mut text = String::new();
        Read::by_ref(&mut file).take(MOST_BYTES).read_to_string(&mut text).ok()?;
        Costs::parse(&text, what)
    }

    /// Keeps them for `what`.
    pub fn write(&self, place: &Path, what: &str) -> io::Result<()> {
        if let Some(folder) = place.parent() {
            fs::create_dir_all(folder)?;
        }
        // Several workers of a host may write at once, each of them a whole file.
        let draft = place.with_extension(format!("{}.draft", std::process::id()));
        let written = File::options().write(true).create_new(true).mode(0o600).open(&draft);
        let written = written.and_then(|mut file| file.write_all(self.text(what).as_bytes()));
        written.and_then(|()| fs::rename(&draft, place)).inspect_err(|_| drop(fs::remove_file(&draft)))
    }

    fn text(&self, what: &str) -> String {
        let row = |cost: &Cost| {
            let Cost { direction, method, bytes, count, nanoseconds } = cost;
            format!("{} {} {bytes} {count} {nanoseconds}\n", way(*direction), method.name())
        };
        let text = format!("{HEAD}\n{what}\n{}", self.0.iter().map(row).collect::<String>());
        format!("{text}{:016x}\n", checksum(text.as_bytes()))
    }

    fn parse(text: &str, what: &str) -> Option<Costs> {
        let end = text.strip_suffix('\n')?.rfind('\n')? + 1;
        let (text, sum) = text.split_at(end);
        if sum.trim_end() != format!("{:016x}", checksum(text.as_bytes())) {
            return None;
        }
        let rows = text.strip_prefix(HEAD)?.strip_prefix('\n')?.strip_prefix(what)?.strip_prefix('\n')?;
        let row = |line: &str| {
            let [direction, method, bytes, count, nanoseconds] = line.split(' ').collect::<Vec<_>>().try_into().ok()?;
            let number = |text: &str| text.parse().ok();
            Some(Cost {
                direction: [Direction::Store, Direction::Load].into_iter().find(|known| way(*known) == direction)?,
                method: Method::ALL.into_iter().find(|known| known.name() == method)?,
                bytes: number(bytes)?,
                count: number(count)?,
                nanoseconds: number(nanoseconds)?,
            })
        };
        rows.lines().map(row).collect::<Option<_>>().map(Costs)
    }
}

fn way(direction: Direction) -> &'static str {
    match direction {
        Direction::Store => "store",
        Direction::Load => "load",
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn cost(method: Method, bytes: u64, count: u64, nanoseconds: u64) -> Cost {
        Cost { direction: Direction::Load, method, bytes, count, nanoseconds }
    }

    fn costs() -> Costs {
        Costs(vec![
            cost(Method::Kernel, 4096, 1000, 100),
            cost(Method::Batch, 4096, 1000, 150),
            cost(Method::Loop, 4096, 1000, 900),
            cost(Method::Kernel, 65536, 1000, 100),
            cost(Method::Batch, 65536, 1000, 149),
            cost(Method::Loop, 65536, 1000, 140),
            Cost { direction: Direction::Store, ..cost(Method::Batch, 4096, 1000, 50) },
        ])
    }

    #[test]
    fn the_nearest_measured_shape_decides_and_the_kernel_has_to_be_half_as_fast_again() {
        let best = |bytes, count| costs().best(Direction::Load, bytes, count, &Method::ALL);
        assert_eq!(best(4096, 1000), Some(Method::Kernel));
        assert_eq!((best(8000, 3000), best(1, 1)), (Some(Method::Kernel), Some(Method::Kernel)));
        assert_eq!((best(65536, 1000), best(1 << 30, 1)), (Some(Method::Loop), Some(Method::Loop)));
    }

    #[test]
    fn only_methods_that_are_in_use_are_chosen() {
        let best = |among: &[Method]| costs().best(Direction::Load, 4096, 1000, among);
        assert_eq!(best(&[Method::Batch, Method::Loop]), Some(Method::Batch));
        assert_eq!(best(&[Method::Loop]), Some(Method::Loop));
        assert_eq!(costs().best(Direction::Store, 4096, 1000, &[Method::Loop]), None);
        assert_eq!(Costs::default().best(Direction::Load, 4096, 1000, &Method::ALL), None);
    }

    #[test]
    fn a_file_that_is_damaged_or_of_another_device_counts_for_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let place = folder.path().join("below").join("costs");
        assert_eq!(Costs::read(&place, "this"), None);
        costs().write(&place, "this").unwrap();
        costs().write(&place, "this").unwrap();
        assert_eq!(Costs::read(&place, "this"), Some(costs()));
        assert_eq!(Costs::read(&place, "that"), None);
        assert_eq!(fs::read_dir(place.parent().unwrap()).unwrap().count(), 1, "a draft is left");
        let text = fs::read(&place).unwrap();
        for at in 0..text.len() {
            let mut damaged = text.clone();
            damaged[at] ^= 1;
            fs::write(&place, &damaged).unwrap();
            assert_eq!(Costs::read(&place, "this"), None, "byte {at}");
            fs::write(&place, &text[..at]).unwrap();
            assert_eq!(Costs::read(&place, "this"), None, "cut at byte {at}");
        }
    }

    #[test]
    fn a_file_that_others_can_write_counts_for_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let place = folder.path().join("costs");
        costs().write(&place, "this").unwrap();
        fs::set_permissions(&place, fs::Permissions::from_mode(0o602)).unwrap();
        assert_eq!(Costs::read(&place, "this"), None);
        let link = folder.path().join("link");
        fs::set_permissions(&place, fs::Permissions::from_mode(0o600)).unwrap();
        std::os::unix::fs::symlink(&place, &link).unwrap();
        assert_eq!(Costs::read(&link, "this"), None);
        assert_eq!(Costs::read(folder.path(), "this"), None);
    }
}
