//! A pool's files have common names, and whoever types the wrong directory has such files: they stay as they are.

use std::ffi::CStr;
use std::io::Write;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use forebay_core::{ErrorKind, Instance};

use super::*;
use crate::pool::check_mount;
use crate::pool::format::{CREATING, GENERATION_MAGIC, LIVE, TABLE_MAGIC};
use crate::pool::mounts::mount_of;

/// What a directory holds: names and the first bytes.
fn content(directory: &Path) -> Vec<(PathBuf, u64, Vec<u8>)> {
    let seen = |path: PathBuf| {
        let length = std::fs::metadata(&path).unwrap().len();
        let mut bytes = vec![0; length.min(64) as usize];
        File::open(&path).unwrap().read_exact_at(&mut bytes, 0).unwrap();
        (path, length, bytes)
    };
    files_in(directory).into_iter().map(seen).collect()
}

/// A start and a removal are refused, name the file, and change nothing.
fn assert_left_alone(home: &Home, name: &str) {
    let before = content(home.path());
    let start = Pool::open(&home.config(2 * MIB)).map(|opened| opened.outcome);
    let (start, removal) = (start.expect_err("a pool was made"), remove(home.path()).expect_err("it is removed"));
    for error in [start, removal] {
        let text = error.told();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{name}: {text}");
        assert!(text.contains("it has a file that Forebay did not make") && text.contains("hint: "), "{name}: {text}");
        assert!(text.contains(&*home.path().join(name).to_string_lossy()), "{name}: {text}");
    }
    assert_eq!(content(home.path()), before, "{name}");
}

#[test]
fn each_file_is_judged_by_itself_whatever_is_beside_it() {
    let _turn = with_others();
    let sealed = {
        let home = Home::another();
        drop(home.pool(2 * MIB));
        let read = |name: &str| std::fs::read(home.path().join(name)).unwrap();
        (read("table"), read("generation"))
    };
    let begun = |state: u32| {
        let mut table = sealed.0[..format::HEADER_HEAD_BYTES].to_vec();
        table[12..16].copy_from_slice(&state.to_le_bytes());
        table
    };
    type Beside = Vec<(&'static str, Vec<u8>)>;
    let all = || vec![("table", sealed.0.clone()), ("generation", sealed.1.clone())];
    let cases: Vec<(Beside, &str, Vec<u8>)> = vec![
        (vec![], "data", b"precious".to_vec()),
        (vec![], "data", vec![]),
        (vec![], "birth", vec![]),
        (vec![], "data.replaced", b"precious".to_vec()),
        (vec![], "data.replaced", vec![1; 2 << 20]),
        (vec![], "table", b"precious".to_vec()),
        (vec![("table", TABLE_MAGIC.to_vec())], "data", b"precious".to_vec()),
        (vec![("table", TABLE_MAGIC.to_vec())], "birth", vec![]),
        (vec![("table", TABLE_MAGIC.to_vec())], "generation", b"precious".to_vec()),
        (vec![("table", TABLE_MAGIC.to_vec())], "data.replaced", vec![1; 2 << 20]),
        (vec![("generation", GENERATION_MAGIC.to_vec())], "table", b"precious".to_vec()),
        (vec![("generation", GENERATION_MAGIC.to_vec())], "namespace", vec![1; 16 << 20]),
        (vec![("table", begun(CREATING))], "data", b"precious".to_vec()),
        (vec![("table", begun(LIVE))], "data", vec![]),
        (vec![("table", begun(LIVE))], "birth", vec![]),
        (all(), "data", b"precious".to_vec()),
        (all(), "data", vec![1; 4 << 20]),
        (all(), "birth", b"precious".to_vec()),
        (all(), "namespace", b"precious".to_vec()),
        (all(), "data.replaced", b"precious".to_vec()),
    ];
    for (beside, name, bytes) in cases {
        println!("{name}, {} bytes, beside {:?}", bytes.len(), beside.iter().map(|it| it.0).collect::<Vec<_>>());
        let home = Home::another();
        for (name, bytes) in beside.into_iter().chain([(name, bytes)]) {
            make_file(&home.path().join(name)).write_all_at(&bytes, 0).unwrap();
        }
        assert_left_alone(&home, name);
    }
}

/// A user's own files have another mode, so a length that fits by chance is not enough.
#[test]
fn a_file_that_only_has_the_length_of_a_pools_is_not_one() {
    let _turn = with_others();
    for name in ["data", "birth", "namespace"] {
        let home = Home::another();
        drop(home.pool(2 * MIB));
        let path = home.path().join(name);
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
        assert_left_alone(&home, name);
    }
    let home = Home::another();
    drop(home.pool(2 * MIB));
    std::fs::write(home.path().join("data.replaced"), vec![1; 2 << 20]).unwrap();
    assert_left_alone(&home, "data.replaced");
}

#[test]
fn what_is_no_file_is_no_pools() {
    let _turn = with_others();
    for name in ["table", "generation", "data", "birth", "namespace", "data.replaced"] {
        let (home, other) = (Home::another(), Home::another());
        let target = other.path().join("target");
        std::fs::write(&target, b"precious").unwrap();
        drop(home.pool(2 * MIB));
        let path = home.path().join(name);
        let _ = std::fs::remove_file(&path);
        symlink(&target, &path).unwrap();
        assert_left_alone(&home, name);
        assert_eq!(std::fs::read(&target).unwrap(), b"precious");
        // `Home` removes directories only with what it can remove.
        std::fs::remove_file(&path).unwrap();
    }
}

/// The files of the home that is not used are common words too.
#[test]
fn a_pool_on_its_mount_does_not_speak_for_files_in_the_directory() {
    let home = Home::new();
    let config = PoolConfig { huge_pages: HugePages::Auto, ..home.config(4 * MIB) };
    drop(Pool::open(&config).unwrap());
    if !home.path().join("mnt").exists() {
        return eprintln!("skipped: nothing can be mounted here");
    }
    let names = ["birth", "data", "namespace", "table"];
    names.iter().for_each(|name| std::fs::write(home.path().join(name), b"precious").unwrap());
    symlink("/etc/hostname", home.path().join("generation")).unwrap();
    let smaller = PoolConfig { huge_pages: HugePages::Off, ..config.clone() };
    for refused in [Pool::open(&PoolConfig { capacity_bytes: 2 * MIB, ..smaller }).err(), remove(home.path()).err()] {
        let text = refused.expect("it is refused").told();
        assert!(text.contains("it has a file that Forebay did not make"), "{text}");
    }
    names.iter().for_each(|name| assert_eq!(std::fs::read(home.path().join(name)).unwrap(), b"precious"));
    names.iter().chain(&["generation"]).for_each(|name| std::fs::remove_file(home.path().join(name)).unwrap());
    assert!(matches!(Pool::open(&config).unwrap().outcome, Outcome::Recovered { .. }), "nothing was lost");
}

/// Files that an earlier build left when it was killed, of whose names each could be a user's.
#[test]
fn what_a_killed_daemon_left_is_a_pools() {
    let _turn = with_others();
    type Leave = fn(&Home);
    let remains: [(&str, Leave); 4] = [
        ("an empty table", |home| drop(make_file(&home.path().join("table")))),
        ("a table of no file", |home| {
            drop(home.pool(2 * MIB));
            write_at(home, "table", 12, &CREATING.to_le_bytes());
            home.file("table").set_len(format::HEADER_HEAD_BYTES as u64).unwrap();
            home.file("generation").set_len(0).unwrap();
            home.file("data").set_len(0).unwrap();
            home.file("birth").set_len(0).unwrap();
            home.file("namespace").set_len(0).unwrap();
        }),
        ("a pool that grew", |home| {
            drop(home.pool(2 * MIB));
            let geometry = Geometry::new(8 * MIB, None).unwrap();
            home.file("table").set_len(format::table_bytes(&geometry)).unwrap();
            home.file("birth").set_len(format::birth_bytes(&geometry)).unwrap();
        }),
        ("generations alone", |home| {
            drop(home.pool(2 * MIB));
            let names = ["table", "data", "birth", "namespace"];
            names.iter().for_each(|name| std::fs::remove_file(home.path().join(name)).unwrap());
        }),
    ];
    for (what, leave) in remains {
        let home = Home::another();
        leave(&home);
        assert!(remove(home.path()).unwrap(), "{what} is removed");
        assert_eq!(files_in(home.path()), [] as [PathBuf; 0], "{what}");
        leave(&home);
        drop(home.pool(2 * MIB));
        assert!(matches!(home.open(2 * MIB).outcome, Outcome::Recovered { .. }), "{what} is replaced");
    }
}

#[test]
fn replaced_data_goes_after_its_engines_though_the_start_between_failed() {
    let home = Home::new();
    let worker = home.pool(2 * MIB).mapper_fds(Instance(1), 1).unwrap();
    write_at(&home, "table", 8, &7u32.to_le_bytes());
    let directory = directory::Directory::claim(home.path()).unwrap();
    found::discard(&found::look(&directory).unwrap().expect("a pool")).unwrap();
    drop((directory, worker));
    assert!(home.path().join("data.replaced").exists());
    assert!(remove(home.path()).unwrap());
    assert_eq!(files_in(home.path()), [] as [PathBuf; 0]);
}

#[test]
fn a_refused_start_leaves_nothing_that_it_made() {
    let home = Home::new();
    for huge_pages in [HugePages::Off, HugePages::Auto] {
        let directory = home.path().join("above/pool");
        let config = PoolConfig { directory, huge_pages, ..home.config(15 << 40) };
        let error = Pool::open(&config).err().expect("15 TiB fit");
        assert_eq!(error.kind(), ErrorKind::Full, "{error}");
        assert_eq!(files_in(home.path()), [] as [PathBuf; 0], "{huge_pages:?}");
        // One that was there stays, without what was mounted in it.
        std::fs::create_dir_all(&config.directory).unwrap();
        Pool::open(&config).err().expect("15 TiB fit");
        assert_eq!(files_in(&config.directory), [] as [PathBuf; 0], "{huge_pages:?}");
        std::fs::remove_dir_all(home.path().join("above")).unwrap();
    }
}

#[test]
fn what_has_the_place_of_the_mount_is_neither_hidden_nor_followed() {
    let _turn = with_others();
    type Put = fn(&Path, &Path);
    let cases: [(&str, &str, Put); 3] = [
        ("a link", "the place of the pool's mount is a symbolic link", |point, other| symlink(other, point).unwrap()),
        ("a file", "it has a file that Forebay did not make", |point, _| std::fs::write(point, b"precious").unwrap()),
        ("a directory", "it has a file that Forebay did not make", |point, _| {
            std::fs::create_dir(point).unwrap();
            std::fs::write(point.join("report"), b"precious").unwrap();
        }),
    ];
    for (what, expected, put) in cases {
        let (home, other) = (Home::another(), Home::another());
        std::fs::write(other.path().join("report"), b"precious").unwrap();
        put(&home.path().join("mnt"), other.path());
        for huge_pages in [HugePages::Auto, HugePages::Off] {
            let start = Pool::open(&PoolConfig { huge_pages, ..home.config(2 * MIB) }).err();
            for refused in [start, remove(home.path()).err()] {
                let text = refused.unwrap_or_else(|| panic!("{what} is passed over")).told();
                assert!(text.contains(expected) && text.contains("hint: "), "{what}: {text}");
            }
        }
        assert_eq!(mount_of(other.path()).unwrap().point, Path::new("/dev/shm"), "{what}");
        assert_eq!(files_in(home.path()), [home.path().join("mnt")], "{what}");
        assert_eq!(std::fs::read(other.path().join("report")).unwrap(), b"precious");
    }
}

/// A tmpfs at a place; unmounted when dropped.
struct Mounted(PathBuf);

impl Mounted {
    /// None where this process may not mount.
    fn new(point: PathBuf) -> Option<Mounted> {
        Mounted::with(point, c"mode=0755")
    }

    /// The same, with these options.
    fn with(point: PathBuf, options: &CStr) -> Option<Mounted> {
        std::fs::create_dir_all(&point).unwrap();
        match rustix::mount::mount("mine", &point, "tmpfs", rustix::mount::MountFlags::empty(), options) {
            Ok(()) => Some(Mounted(point)),
            Err(error) => {
                eprintln!("skipped: nothing can be mounted here: {error}");
                None
            }
        }
    }
}

impl Mounted {
    /// A directory at a second place.
    fn bound(source: &Path, point: PathBuf) -> Mounted {
        rustix::mount::mount_bind(source, &point).unwrap();
        Mounted(point)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // The test may have ended with it unmounted.
        let _ = rustix::mount::unmount(&self.0, rustix::mount::UnmountFlags::DETACH);
    }
}

#[test]
fn a_filesystem_that_somebody_else_mounted_stays_with_its_files() {
    let home = Home::new();
    let Some(Mounted(point)) = &Mounted::new(home.path().join("mnt")) else { return };
    std::fs::write(point.join("report"), b"precious").unwrap();
    let before = mount_of(point).unwrap();
    for huge_pages in [HugePages::Auto, HugePages::Off] {
        let start = Pool::open(&PoolConfig { huge_pages, ..home.config(2 * MIB) }).err();
        for refused in [start, remove(home.path()).err()] {
            let text = refused.expect("it is refused").told();
            assert!(text.contains("it has a mount that Forebay did not make") && text.contains("hint: "), "{text}");
        }
    }
    assert_eq!(mount_of(point).unwrap(), before);
    assert_eq!(std::fs::read(point.join("report")).unwrap(), b"precious");
    // One that is empty may be an operator's for the pool. It is used, and is not Forebay's to unmount.
    std::fs::remove_file(point.join("report")).unwrap();
    drop(Pool::open(&PoolConfig { huge_pages: HugePages::Auto, ..home.config(2 * MIB) }).unwrap());
    assert!(remove(home.path()).unwrap());
    assert_eq!(mount_of(point).unwrap(), before);
}

#[test]
fn a_filesystem_that_somebody_mounted_over_the_pools_own_is_named_as_the_cause() {
    let (home, other) = (Home::new(), Home::new());
    let config = PoolConfig { huge_pages: HugePages::Auto, ..home.config(2 * MIB) };
    drop(Pool::open(&config).unwrap());
    let point = home.path().join("mnt");
    if !point.exists() {
        return eprintln!("skipped: nothing can be mounted here");
    }
    type Mount<'a> = &'a dyn Fn() -> Mounted;
    let uppers: [(&str, Mount); 3] = [
        ("a tmpfs", &|| Mounted::with(point.clone(), c"mode=0755").unwrap()),
        ("a tmpfs that all may write", &|| Mounted::with(point.clone(), c"mode=1777").unwrap()),
        ("a directory of the pool's own filesystem", &|| Mounted::bound(other.path(), point.clone())),
    ];
    for (what, mount) in uppers {
        let upper = mount();
        std::fs::write(upper.0.join("report"), b"precious").unwrap();
        let looked = check_mount(home.path()).err();
        for refused in [looked, Pool::open(&config).err(), remove(home.path()).err()] {
            let text = refused.unwrap_or_else(|| panic!("{what} is passed over")).told();
            let hint = format!("`umount {}`", upper.0.display());
            let is_named = text.contains("is mounted over the one in the pool's directory") && text.contains(&hint);
            assert!(is_named, "{what}: {text}");
        }
        assert_eq!(std::fs::read(upper.0.join("report")).unwrap(), b"precious");
    }
    check_mount(home.path()).unwrap();
    assert!(remove(home.path()).unwrap());
}

#[test]
fn files_that_somebody_put_beside_the_pool_on_its_mount_keep_the_mount() {
    let home = Home::new();
    let config = PoolConfig { huge_pages: HugePages::Auto, ..home.config(4 * MIB) };
    drop(Pool::open(&config).unwrap());
    let point = home.path().join("mnt");
    if !point.exists() {
        return eprintln!("skipped: nothing can be mounted here");
    }
    std::fs::write(point.join("report"), b"precious").unwrap();
    assert!(remove(home.path()).unwrap());
    assert_eq!(files_in(&point), [point.join("report")]);
    assert_eq!(std::fs::read(point.join("report")).unwrap(), b"precious");
    assert!(!remove(home.path()).unwrap(), "no pool is there");
    std::fs::remove_file(point.join("report")).unwrap();
    assert!(remove(home.path()).unwrap());
    assert_eq!(files_in(home.path()), [] as [PathBuf; 0]);
}

#[test]
fn a_pool_tells_that_its_file_was_removed() {
    let home = Home::new();
    let pool = Pool::open(&home.config(2 * MIB)).unwrap().pool;
    pool.check_files().unwrap();
    let data = files_in(home.path()).into_iter().find(|path| path.ends_with("data")).unwrap();
    let away = home.path().join("away");
    std::fs::rename(&data, &away).unwrap();
    let removed = pool.check_files().unwrap_err();
    assert!(removed.to_string().contains("was removed") && removed.hint_text().is_some(), "{removed}");
    std::fs::write(&data, b"another").unwrap();
    assert_eq!(pool.check_files().unwrap_err().kind(), ErrorKind::NotFound, "another file in its place");
    std::fs::rename(&away, &data).unwrap();
    pool.check_files().unwrap();
}

#[test]
fn a_pool_tells_that_others_have_filled_its_filesystem() {
    let home = Home::new();
    let Some(Mounted(point)) = &Mounted::with(home.path().join("small"), c"mode=0755,size=8m") else { return };
    let config = PoolConfig { directory: point.join("pool"), huge_pages: HugePages::Off, ..home.config(2 * MIB) };
    let pool = Pool::open(&config).unwrap().pool;
    pool.check_files().unwrap();
    let junk = point.join("junk");
    let mut file = File::create(&junk).unwrap();
    while file.write_all(&[1; 4096]).is_ok() {}
    let full = pool.check_files().unwrap_err();
    assert_eq!((full.kind(), full.hint_text().is_some()), (ErrorKind::Full, true), "{full}");
    std::fs::remove_file(&junk).unwrap();
    drop(file);
    pool.check_files().unwrap();
}
