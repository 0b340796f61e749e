//! Real files: who may use one, and what may happen to it.

use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use forebay_core::tier::{Completion, Outcome, Tier};
use forebay_core::{ErrorKind, Result};
use forebay_io::ssd::{DiskClaim, DiskConfig, Inspection, Prospect, Ssd, SsdConfig, examine};
use forebay_io::uring::{EngineChoice, Region};
use rustix::event::{PollFd, PollFlags};

use crate::bed::{Bed, MIB, SLOT_BYTES, SLOTS};

/// A directory on a real disk: direct I/O is no such thing in memory.
pub fn home() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

pub fn file_config(path: &Path, capacity_bytes: u64) -> SsdConfig {
    SsdConfig::new(vec![DiskConfig { path: path.to_owned(), capacity_bytes: Some(capacity_bytes), create: true }])
}

/// Of the one disk of a configuration.
pub fn claimed(config: &SsdConfig) -> Result<DiskClaim> {
    DiskClaim::new(&config.disks[0])
}

pub fn open(config: &SsdConfig, pool: &Region) -> Result<Ssd> {
    Ssd::open(vec![claimed(config)?], config, pool)
}

/// A device over a file. None where this user may not make one.
pub struct Loop(pub PathBuf);

impl Loop {
    pub fn over(file: &Path) -> Option<Loop> {
        let made = Command::new("losetup").args(["--find", "--show"]).arg(file).output().ok()?;
        let path = String::from_utf8(made.stdout).ok()?;
        made.status.success().then(|| Loop(path.trim().into()))
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("--detach").arg(&self.0).status();
    }
}

/// Sleeps until the tier has something to do.
pub fn turn_taken(ssd: &Ssd, timeout: Duration) {
    let fd = ssd.wake_fd();
    let timeout = timeout.try_into().unwrap();
    let _ = rustix::event::poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&timeout));
}

/// Opens as a daemon does after another: the other's locks may need a moment to go.
pub fn open_when_free(config: &SsdConfig, pool: &Region) -> Ssd {
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        let claim = claimed(config).and_then(|mut claim| Ok((claim.is_earlier_io_done()?, claim)));
        match claim {
            Ok((true, claim)) => return Ssd::open(vec![claim], config, pool).unwrap(),
            Err(error) if error.kind() != ErrorKind::Unavailable => panic!("{error}"),
            _ if Instant::now() > deadline => panic!("the disk does not become free"),
            _ => std::thread::sleep(Duration::from_millis(1)),
        }
    }
}

fn pool() -> Region {
    Region::anonymous((SLOTS * SLOT_BYTES) as usize).unwrap()
}

#[test]
fn two_daemons_on_one_file_are_refused() {
    let home = home();
    for engine in [EngineChoice::Uring, EngineChoice::Threads] {
        let mut config = file_config(&home.path().join("disk"), 32 * MIB);
        config.engine = engine;
        let first = open_when_free(&config, &pool());
        let error = claimed(&config).err().expect("a second daemon is refused");
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        assert!(error.hint_text().unwrap().contains("it is taken when the call ends"), "{error}");
        drop(first);
        open_when_free(&config, &pool());
    }
}

#[test]
fn a_file_with_something_else_in_it_is_refused_and_left_alone() {
    let home = home();
    let path = home.path().join("notes");
    let torn = [&b"FOREBAYS\x01\0\0\0"[..], &[7; 8000]].concat();
    let behind = |bytes: usize| [vec![0; bytes], b"x".to_vec()].concat();
    // Some are as long as the disk is to be, or longer.
    for content in [
        b"x".to_vec(),
        vec![b'x'; 3 << 20],
        behind(5000),
        behind(1 << 20),
        behind(5 << 20),
        behind(40 << 20),
        torn,
        vec![b'x'; 32 << 20],
        vec![b'x'; 40 << 20],
    ] {
        std::fs::write(&path, &content).unwrap();
        let error = claimed(&file_config(&path, 32 * MIB)).err().expect("it is refused before the daemon serves");
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(error.to_string().contains("holds other data"), "{error}");
        assert!(error.hint_text().unwrap().contains("another file"), "{error}");
        assert!(std::fs::read(&path).unwrap() == content, "it was changed");
    }
    // What holds nothing yet is lengthened.
    std::fs::write(&path, [0; 5000]).unwrap();
    drop(open_when_free(&file_config(&path, 32 * MIB), &pool()));
    let length = || std::fs::metadata(&path).unwrap().len();
    assert_eq!(length(), 32 * MIB);
    // What is ours keeps its capacity, so more space would be lost.
    drop(open_when_free(&file_config(&path, 64 * MIB), &pool()));
    assert_eq!(length(), 32 * MIB);
    // One that was cut gets its capacity back.
    File::options().write(true).open(&path).unwrap().set_len(8 * MIB).unwrap();
    drop(open_when_free(&file_config(&path, 64 * MIB), &pool()));
    assert!((31 * MIB..=32 * MIB).contains(&length()), "{}", length());
}

#[test]
fn a_symbolic_link_that_others_could_have_made_is_not_followed() {
    let home = home();
    let [target, link] = ["target", "link"].map(|name| home.path().join(name));
    std::os::unix::fs::symlink(&target, &link).unwrap();
    for mode in [0o777, 0o1777, 0o770] {
        std::fs::set_permissions(home.path(), PermissionsExt::from_mode(mode)).unwrap();
        let error = claimed(&file_config(&link, 32 * MIB)).err().expect("it is refused");
        assert!(error.to_string().contains("symbolic link") && error.hint_text().is_some(), "{error}");
        assert!(!target.exists(), "mode {mode:o}: it was made through the link");
    }
    std::fs::set_permissions(home.path(), PermissionsExt::from_mode(0o700)).unwrap();
    drop(open_when_free(&file_config(&link, 32 * MIB), &pool()));
    assert!(target.exists(), "our own link is followed");
}

#[test]
fn a_disk_in_a_directory_that_others_may_change_is_refused_whatever_link_leads_there() {
    let home = home();
    let [above, inside, link, end] = ["above", "above/inside", "link", "end"].map(|name| home.path().join(name));
    std::fs::create_dir_all(&inside).unwrap();
    std::os::unix::fs::symlink(&inside, &link).unwrap();
    std::os::unix::fs::symlink(inside.join("disk"), &end).unwrap();
    File::create(inside.join("disk")).unwrap();
    std::fs::set_permissions(inside.join("disk"), PermissionsExt::from_mode(0o600)).unwrap();
    std::fs::set_permissions(&above, PermissionsExt::from_mode(0o777)).unwrap();
    for path in [inside.join("disk"), inside.join("new"), link.join("disk"), end] {
        let error = claimed(&file_config(&path, 32 * MIB)).err().expect("it is refused");
        assert!(error.kind() == ErrorKind::Invalid && error.hint_text().is_some(), "{error}");
    }
    assert!(!inside.join("new").exists() && std::fs::metadata(inside.join("disk")).unwrap().len() == 0);
    std::fs::set_permissions(&above, PermissionsExt::from_mode(0o755)).unwrap();
    for path in [inside.join("disk"), link.join("disk"), home.path().join("end")] {
        drop(open_when_free(&file_config(&path, 32 * MIB), &pool()));
    }
}

#[test]
fn a_link_above_a_disk_that_others_could_have_made_is_not_followed() {
    let home = home();
    let [theirs, ours] = ["theirs", "ours"].map(|name| home.path().join(name));
    std::fs::create_dir_all(ours.join("inside")).unwrap();
    std::fs::create_dir(&theirs).unwrap();
    std::os::unix::fs::symlink(&ours, theirs.join("way")).unwrap();
    std::os::unix::fs::symlink(theirs.join("way"), home.path().join("link")).unwrap();
    std::fs::set_permissions(&theirs, PermissionsExt::from_mode(0o1777)).unwrap();
    for path in [theirs.join("way/disk"), theirs.join("way/inside/disk"), home.path().join("link/inside/disk")] {
        let error = claimed(&file_config(&path, 32 * MIB)).err().expect("it is refused");
        assert!(error.to_string().contains("symbolic link") && error.hint_text().is_some(), "{error}");
    }
    assert!(!ours.join("disk").exists() && !ours.join("inside/disk").exists());
}

#[test]
fn a_disk_that_others_took_over_is_refused_and_a_damaged_first_page_is_made_again() {
    let home = home();
    let config = file_config(&home.path().join("disk"), 32 * MIB);
    drop(open_when_free(&config, &pool()));
    let file = File::options().read(true).write(true).open(&config.disks[0].path).unwrap();
    file.write_all_at(b"a filesystem of others", 0).unwrap();
    file.write_all_at(b"its second page", 4096).unwrap();
    let error = claimed(&config).err().expect("it is refused");
    assert!(error.to_string().contains("other data"), "{error}");
    file.write_all_at(&[0; 15], 4096).unwrap();
    drop(open_when_free(&config, &pool()));
}

/// A killed daemon's transfers hold the description they were started on. Here another description plays it.
#[test]
fn a_disk_is_not_opened_before_all_earlier_io_is_over() {
    let home = home();
    let config = file_config(&home.path().join("disk"), 32 * MIB);
    drop(open(&config, &pool()).unwrap());
    let transfers = File::options().read(true).write(true).open(&config.disks[0].path).unwrap();
    let deadline = Instant::now() + Duration::from_secs(10);
    while !forebay_io::uring::try_lock(&transfers, forebay_io::ssd::TRANSFERS_BYTE).unwrap() {
        assert!(Instant::now() < deadline, "a closed tier gives its locks back");
    }
    let mut claim = claimed(&config).unwrap();
    assert!(!claim.is_earlier_io_done().unwrap());
    let error = Ssd::open(vec![claim], &config, &pool()).err().expect("it is not opened");
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    drop(transfers);
    let mut claim = claimed(&config).unwrap();
    assert!(claim.is_earlier_io_done().unwrap());
    Ssd::open(vec![claim], &config, &pool()).unwrap();
}

#[test]
fn a_file_that_does_not_fit_is_an_error_with_a_hint_and_stays_as_it_is() {
    let home = home();
    let path = home.path().join("disk");
    File::create(&path).unwrap().set_len(MIB).unwrap();
    let error = claimed(&file_config(&path, 1 << 50)).err().expect("no disk is so large");
    assert_eq!(error.kind(), ErrorKind::Full);
    assert!(error.hint_text().unwrap().contains("capacity_bytes"), "{error}");
    assert_eq!(std::fs::metadata(&path).unwrap().len(), MIB);
}

#[test]
fn a_blank_file_gets_its_capacity_and_no_more() {
    let home = home();
    for length in [0, 32 * MIB, 1 << 30] {
        let path = home.path().join(format!("disk-{length}"));
        File::create(&path).unwrap().set_len(length).unwrap();
        let config = file_config(&path, 32 * MIB);
        let ssd = open(&config, &pool()).unwrap();
        let is_there = std::fs::metadata(&path).unwrap().blocks() * 512;
        assert!((32 * MIB..40 * MIB).contains(&is_there), "{is_there} of a file of {length}");
        drop(ssd);
        open_when_free(&config, &pool());
    }
}

#[test]
fn a_smaller_capacity_than_a_disk_was_made_with_is_refused_with_its_number() {
    let home = home();
    let path = home.path().join("disk");
    drop(open(&file_config(&path, 64 * MIB), &pool()).unwrap());
    let file = File::options().write(true).open(&path).unwrap();
    file.set_len(16 * MIB).unwrap();
    let deadline = Instant::now() + Duration::from_secs(10);
    let config = file_config(&path, 32 * MIB);
    let error = loop {
        match open(&config, &pool()) {
            Err(error) if error.kind() == ErrorKind::Unavailable => assert!(Instant::now() < deadline),
            Err(error) => break error,
            Ok(_) => panic!("it is refused"),
        }
    };
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(error.hint_text().unwrap().contains(&(64 * MIB).to_string()), "{error}");
}

/// A file that loses its end while it is used: its blocks there are misses, and nothing hangs.
#[test]
fn a_file_that_is_truncated_under_load_costs_blocks_and_nothing_else() {
    let home = home();
    for engine in [EngineChoice::Uring, EngineChoice::Threads] {
        let path = home.path().join(format!("{engine:?}"));
        let config = SsdConfig { engine, segment_bytes: Some(MIB), ..file_config(&path, 24 * MIB) };
        let pool = pool();
        let mut bed = Bed::on_file(open_when_free(&config, &pool), &pool);
        bed.store_all((0..300).map(|number| (number, 20_000)));
        File::options().write(true).open(&path).unwrap().set_len(4 * MIB).unwrap();
        let outcomes: Vec<Outcome> = (0..300).map(|number| bed.look(number, 20_000)).collect();
        let loaded = outcomes.iter().filter(|outcome| matches!(outcome, Outcome::Loaded { .. })).count();
        assert!((100..250).contains(&loaded), "the first three of six segments are left, {loaded} blocks");
        for outcome in outcomes {
            let is_honest = matches!(outcome, Outcome::Loaded { .. } | Outcome::Failed(_) | Outcome::Absent);
            assert!(is_honest, "{outcome:?}");
        }
        // New blocks lengthen the file again; a failed disk is asked how it is.
        let stores: Vec<_> = (400..440).map(|number| bed.store(number, number - 400, 20_000)).collect();
        bed.run(&stores).unwrap();
        drop(bed);
        File::options().write(true).open(&path).unwrap().set_len(4 * MIB).unwrap();
        let found = examine(&DiskConfig { path: path.clone(), ..config.disks[0].clone() }).prospect.unwrap();
        assert_eq!(found, Prospect::Take { made_bytes: None, cut_bytes: Some(4 * MIB) });
        let error = Inspection::open(&path).err().expect("it was cut");
        assert!(error.to_string().contains("this disk was cut"), "{error}");
        let mut bed = Bed::on_file(open_when_free(&config, &pool), &pool);
        assert!(bed.ssd.report()[0].recovery.segments_lost > 0);
        let outcomes: Vec<Outcome> = (0..300).map(|number| bed.look(number, 20_000)).collect();
        assert!(outcomes.iter().any(|outcome| matches!(outcome, Outcome::Loaded { .. })), "{engine:?}");
        bed.store_all((500..520).map(|number| (number, 20_000)));
    }
}

#[test]
fn a_disk_is_inspected_while_no_daemon_uses_it() {
    let home = home();
    let config = file_config(&home.path().join("disk"), 32 * MIB);
    let path = &config.disks[0].path;
    let pool = pool();
    let mut bed = Bed::on_file(open_when_free(&config, &pool), &pool);
    bed.store_all((0..50).map(|number| (number, 20_000)));
    let error = Inspection::open(path).err().expect("a daemon has it");
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    let mut held = bed.blocks();
    drop(bed);
    drop(open_when_free(&config, &pool));
    let mut inspection = Inspection::open(path).unwrap();
    let mut found: Vec<_> = inspection.blocks().map(Result::unwrap).collect();
    held.sort_by_key(|block| (block.segment, block.first_page));
    found.sort_by_key(|block| (block.segment, block.first_page));
    assert_eq!(found, held);
    assert_eq!(inspection.audit().unwrap().damaged_blocks, 0);
}

#[test]
fn a_filesystem_without_direct_io_is_used_through_the_page_cache() {
    let Ok(home) = tempfile::tempdir_in("/dev/shm") else { panic!("a Linux without /dev/shm") };
    let config = file_config(&home.path().join("disk"), 32 * MIB);
    let mut ssd = open(&config, &pool()).unwrap();
    // Newer kernels take direct I/O on tmpfs too: either way it works, and the report says which it is.
    let _ = ssd.report()[0].is_direct;
    let mut completions: Vec<Completion> = Vec::new();
    ssd.poll(&mut completions);
    assert!(completions.is_empty() && ssd.report()[0].recovery.was_made);
}
