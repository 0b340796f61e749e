//! A model of hosts that store, fail, remove, report late, stop for a while, sweep several at a time and die. It uses
//! the real grants and a directory in memory. It runs one step at a time, in an order drawn from a seed, by a clock
//! that jumps. Steps of one host may come between any two steps of another.

use std::collections::HashMap;

use super::super::samples::Samples;
use super::*;

const CAPACITY: u64 = 1 << 20;
const AGE: Duration = Duration::from_secs(5);
const PLACES: u64 = 16;

/// A walk that sees each folder at a different moment.
struct Walking {
    basis: Option<Option<u64>>,
    begun: Option<Figures>,
    next_place: u64,
    found_bytes: u64,
}

struct Host {
    grants: Grants,
    samples: Samples,
    walking: Option<Walking>,
    /// Spent but not published, and since when.
    storing: Vec<(u64, Spent, Duration)>,
    /// Removed but not reported yet.
    removed: Vec<(u64, Count)>,
}

struct Model {
    home: tempfile::TempDir,
    hosts: Vec<Host>,
    /// Published files: folder and length.
    files: HashMap<u64, u64>,
    now: Duration,
    /// How many of the hosts are active.
    awake: u64,
    seed: u64,
}

impl Model {
    fn new(seed: u64) -> Model {
        let home = tempfile::tempdir().unwrap();
        std::fs::create_dir(home.path().join(OWN_FOLDER)).unwrap();
        std::fs::write(home.path().join(OWN_FOLDER).join(USAGE), Grants::empty()).unwrap();
        let mut model = Model { home, hosts: Vec::new(), files: HashMap::new(), now: AGE, awake: 4, seed };
        model.hosts = (0..4).map(|_| model.host()).collect();
        model
    }

    fn host(&self) -> Host {
        let grants = Grants::new(self.home.path().to_owned(), Some(CAPACITY), AGE);
        let (storing, removed) = (Vec::new(), Vec::new());
        Host { grants, samples: Samples::new(AGE), walking: None, storing, removed }
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.seed = self.seed.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (self.seed >> 33) % limit
    }

    fn step(&mut self) {
        let passed_ms = [1, 10, 100, 400][self.below(4) as usize];
        self.now += Duration::from_millis(passed_ms);
        // Most of the time some hosts are stopped while they hold grants.
        if self.below(200) == 0 {
            self.awake = 1 + self.below(self.hosts.len() as u64);
        }
        let (at, what) = (self.below(self.awake) as usize, self.below(100));
        let (chance, bytes, now) = (self.below(1 << 30), 100 + self.below(300), self.now);
        if what == 99 && chance % 8 == 0 {
            // The host is killed; another one takes its place.
            self.hosts[at] = self.host();
            return;
        }
        let files = &mut self.files;
        let host = &mut self.hosts[at];
        match what {
            0..45 => {
                if let Some(spent) = host.grants.spend(bytes, now).unwrap() {
                    host.storing.push((bytes, spent, now));
                }
            }
            45..75 if !host.storing.is_empty() => {
                let (bytes, spent, _) = host.storing.swap_remove((chance % host.storing.len() as u64) as usize);
                match chance % 10 {
                    0 => host.grants.refund(spent),
                    _ => drop(files.insert(chance, bytes)),
                }
            }
            75..80 => {
                // The real sweeper reads the count, removes and reports in three steps; the last may come late.
                let count = host.grants.count();
                if let Some(file) = files.keys().copied().min_by_key(|file| file ^ chance) {
                    let bytes = files.remove(&file).unwrap();
                    host.removed.push((bytes, count));
                }
            }
            80..85 => {
                host.removed.drain(..).for_each(|(bytes, count)| host.grants.removed(bytes, count));
                host.grants.settle(now, false).unwrap();
            }
            85..99 => host.sweep(files, now),
            _ => {}
        }
    }

    /// In this model no store hangs for as long as a grant lives.
    fn publish_old(&mut self) {
        for host in &mut self.hosts {
            let is_old = |store: &mut (u64, Spent, Duration)| self.now - store.2 > AGE - Duration::from_secs(2);
            for (bytes, _, _) in host.storing.extract_if(.., is_old) {
                let place = self.files.len() as u64 * 7919 + self.now.as_millis() as u64;
                self.files.insert(place << 20 | bytes, bytes);
            }
        }
    }
}

impl Host {
    fn sweep(&mut self, files: &HashMap<u64, u64>, now: Duration) {
        let figures = self.grants.figures().unwrap();
        self.samples.saw(figures.as_ref(), now);
        let (basis, begun) = (self.samples.basis(), figures);
        // The figures were damaged and repaired, perhaps more than once.
        self.walking.take_if(|walking| walking.begun.is_some() != figures.is_some());
        let walking = self.walking.get_or_insert(Walking { basis, begun, next_place: 0, found_bytes: 0 });
        let is_here = |file: &u64| file % PLACES == walking.next_place;
        walking.found_bytes += files.iter().filter(|(file, _)| is_here(file)).map(|(_, bytes)| bytes).sum::<u64>();
        walking.next_place += 1;
        if let Some(walked) = self.walking.take_if(|walking| walking.next_place == PLACES)
            && let Some(granted_bytes) = walked.basis
        {
            self.grants.counted(walked.found_bytes, granted_bytes, walked.begun).unwrap();
        }
    }
}

#[test]
fn whatever_hosts_do_the_capacity_is_not_exceeded_and_room_comes_back() {
    let seeds = std::env::var("SEED").map_or(1..6, |seed| seed.parse().map(|seed| seed..seed + 1).unwrap());
    for seed in seeds {
        let (mut model, mut most) = (Model::new(seed), 0);
        for step in 0..20_000 {
            model.step();
            model.publish_old();
            if step % 4001 == 4000 {
                // The figures are lost.
                std::fs::write(model.home.path().join(OWN_FOLDER).join(USAGE), "no figure").unwrap();
            }
            let published_bytes: u64 = model.files.values().sum();
            assert!(published_bytes <= CAPACITY, "seed {seed}, step {step}: {published_bytes} of {CAPACITY}");
            most = most.max(published_bytes);
        }
        assert!(most > CAPACITY - CAPACITY / 20, "seed {seed}: it was filled to {most} only");
    }
}
