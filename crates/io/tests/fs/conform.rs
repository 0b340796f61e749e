//! The suite for tiers, on one directory and several, through the page cache and past it.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use forebay_core::BlockKey;
use forebay_core::decorate::Timed;
use forebay_core::tier::{OpKind, Outcome, Tier};
use forebay_io::conformance::{self, SLOT_BYTES, SLOTS};
use forebay_io::fs::{Fs, FsConfig, Fsync};
use forebay_io::header::Sealing;
use forebay_io::uring::Region;

use crate::bed::{self, Host, files, name_of};

pub struct Bed {
    config: FsConfig,
    pool: Region,
    fs: Option<Fs>,
}

impl Bed {
    pub fn new(config: FsConfig) -> Bed {
        let pool = Region::anonymous((SLOTS * SLOT_BYTES) as usize).unwrap();
        let fs = Some(Fs::open(&config, pool.clone()).unwrap());
        Bed { config, pool, fs }
    }

    fn fs(&mut self) -> &mut Fs {
        self.fs.as_mut().unwrap()
    }
}

impl conformance::Bed for Bed {
    fn tier(&mut self) -> &mut dyn Tier {
        self.fs()
    }

    fn pool(&self) -> Region {
        self.pool.clone()
    }

    fn turn(&mut self) {
        bed::turn_taken(self.fs(), Duration::from_millis(1));
        self.fs().advance(Duration::ZERO);
    }

    fn reopen(&mut self) {
        self.fs = None;
        self.fs = Some(Fs::open(&self.config, self.pool.clone()).unwrap());
    }

    fn damage(&mut self, key: &BlockKey, length_bytes: u64) -> bool {
        let (namespace, name) = (key.namespace.to_string(), format!("{:04x}-{}", key.group, key.hash));
        let is_it =
            |path: &std::path::Path| name_of(path) == name && path.iter().any(|part| part.to_str() == Some(&namespace));
        let path = self.config.directories.iter().flat_map(|root| files(root)).find(|path| is_it(path)).unwrap();
        let file = File::options().read(true).write(true).open(path).unwrap();
        let (at, mut byte) = (4096 + length_bytes / 2, [0]);
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 0x40], at).unwrap();
        true
    }
}

#[test]
fn the_tier_conforms_through_the_page_cache() {
    let home = bed::home();
    let config = FsConfig { fsync: Fsync::Data, ..FsConfig::new(vec![home.path().to_owned()]) };
    conformance::check(&mut Bed::new(config));
}

#[test]
fn the_tier_conforms_with_a_secret() {
    let home = bed::home();
    let sealing = Sealing::with(&[7; 32]).unwrap();
    conformance::check(&mut Bed::new(FsConfig { sealing, ..FsConfig::new(vec![home.path().to_owned()]) }));
}

#[test]
fn the_tier_conforms_past_the_page_cache_and_without_shards() {
    let home = bed::home();
    let config = FsConfig {
        io_direct: true,
        is_sharded: false,
        fsync: Fsync::All,
        capacity_bytes: Some(1 << 30),
        ..FsConfig::new(vec![home.path().to_owned()])
    };
    conformance::check(&mut Bed::new(config));
}

#[test]
fn the_tier_conforms_on_two_directories_with_one_thread_and_one_buffer_each() {
    let home = bed::home();
    let directories: Vec<_> = ["a", "b"].map(|name| home.path().join(name)).into();
    directories.iter().for_each(|path| std::fs::create_dir(path).unwrap());
    let config = FsConfig { streams: 1, buffers: 1, ..FsConfig::new(directories.clone()) };
    conformance::check(&mut Bed::new(config));
    for path in directories {
        assert!(bed::objects(&path).len() > 50, "keys are spread over the directories");
    }
}

#[test]
fn another_order_of_directories_finds_the_same_blocks() {
    let home = bed::home();
    let mut directories: Vec<_> = ["a", "b", "c"].map(|name| home.path().join(name)).into();
    directories.iter().for_each(|path| std::fs::create_dir(path).unwrap());
    let mut host = Host::open(&FsConfig { fsync: Fsync::None, ..FsConfig::new(directories.clone()) });
    (0..40).for_each(|number| host.is_stored(number, 5000));
    drop(host);
    directories.reverse();
    let mut host = Host::open(&FsConfig::new(directories));
    for number in 0..40 {
        assert!(matches!(host.find(number), Outcome::Found));
        host.verify(number, 5000);
    }
    let remove = host.op(OpKind::Remove, 3, 0);
    assert_eq!(host.run(&[remove]), [Outcome::Removed]);
    assert_eq!(host.find(3), Outcome::Absent);
}
