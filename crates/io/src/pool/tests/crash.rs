//! `kill -9` at any instruction.
//!
//! A child does the work under `ptrace`; the test advances it by one instruction (or one system call) at a time.
//! Whenever the files have changed the test copies them in the state that they would have if the child had died
//! there. It opens the copy as a pool and checks the pool's content.

#![allow(unsafe_code)]

use std::collections::BTreeSet;
use std::os::unix::net::UnixStream;
use std::ptr::null_mut;

use forebay_core::Instance;
use rustix::fs::SeekFrom;

use super::process::{Actor, act, soon};
use super::*;

const SLOT: SlotId = SlotId(2);
const OLD: u64 = 1;
const NEW: u64 = 2;

/// A child stopped under `ptrace` at the beginning of its work.
struct Traced {
    actor: Actor,
    thread: libc::pid_t,
}

/// How far to advance before the next check.
#[derive(Clone, Copy)]
enum Step {
    Instruction,
    SystemCall,
}

impl Traced {
    /// Waits until the child is at the beginning of its work.
    fn seize(actor: Actor) -> Traced {
        let thread = actor.hear().parse().unwrap();
        let traced = Traced { actor, thread };
        assert!(traced.wait(), "the child did not get as far as its work");
        traced
    }

    /// Advances the child by one step; false when it has finished its work.
    fn advance(&self, step: Step) -> bool {
        let request = match step {
            Step::Instruction => libc::PTRACE_SINGLESTEP,
            Step::SystemCall => libc::PTRACE_SYSCALL,
        };
        // SAFETY: the thread is stopped under our trace; the request moves no memory.
        let rc = unsafe { libc::ptrace(request, self.thread, null_mut::<u8>(), null_mut::<u8>()) };
        assert_eq!(rc, 0, "{}", std::io::Error::last_os_error());
        self.wait()
    }

    /// Waits for the next stop; false if the child stopped itself because it is done.
    fn wait(&self) -> bool {
        let mut status = 0;
        // SAFETY: `status` is written by the call alone.
        let rc = unsafe { libc::waitpid(self.thread, &mut status, libc::__WALL) };
        assert_eq!(rc, self.thread, "{}", std::io::Error::last_os_error());
        assert!(libc::WIFSTOPPED(status), "the child ended with status {status:#x}");
        match libc::WSTOPSIG(status) {
            libc::SIGTRAP | libc::SIGSTOP => true,
            libc::SIGUSR2 => false,
            signal => panic!("the child got signal {signal}"),
        }
    }
}

impl Drop for Traced {
    fn drop(&mut self) {
        let _ = self.actor.child.kill();
        // A traced thread is reaped by its tracer; the process cannot be before.
        // SAFETY: no status is asked for.
        unsafe { libc::waitpid(self.thread, null_mut(), libc::__WALL) };
    }
}

/// In the child: lets the test trace this thread, and waits for its first step.
fn begin_work(socket: &UnixStream) {
    // SAFETY: these calls touch no memory of this process.
    unsafe {
        assert_eq!(libc::ptrace(libc::PTRACE_TRACEME, 0, null_mut::<u8>(), null_mut::<u8>()), 0);
        let thread = libc::syscall(libc::SYS_gettid);
        send_fds(socket, thread.to_string().as_bytes(), &[], soon()).unwrap();
        libc::raise(libc::SIGSTOP);
    }
}

/// In the child: tells the test that the work is done.
fn end_work() {
    // SAFETY: the tracing test sees the signal, and kills the child.
    unsafe { libc::raise(libc::SIGUSR2) };
}

/// Copies a pool's files, holes as holes.
fn image_of(directory: &Path) -> Home {
    let image = Home::another();
    for path in files_in(directory) {
        let (from, name) = (File::open(&path).unwrap(), path.file_name().unwrap());
        let to = make_file(&image.path().join(name));
        to.set_len(from.metadata().unwrap().len()).unwrap();
        let mut at = 0;
        while let Ok(start) = rustix::fs::seek(&from, SeekFrom::Data(at)) {
            let end = rustix::fs::seek(&from, SeekFrom::Hole(start)).unwrap();
            let mut bytes = vec![0; (end - start) as usize];
            from.read_exact_at(&mut bytes, start).unwrap();
            to.write_all_at(&bytes, start).unwrap();
            at = end;
        }
    }
    image
}

/// Opens a pool with one block in `SLOT`, then replaces that block by another, doing the work of a daemon and a
/// worker.
pub fn play_store(socket: &UnixStream, directory: &Path) {
    let config = PoolConfig {
        directory: directory.to_owned(),
        capacity_bytes: 2 * MIB,
        unit_bytes: None,
        huge_pages: HugePages::Off,
    };
    let pool = Pool::open(&config).unwrap().pool;
    let worker = Mapping::new(pool.mapper_fds(Instance(3), 0).unwrap(), &pool.description()).unwrap();
    let (entry, bytes) = block(NEW);
    begin_work(socket);
    pool.free(SLOT, Generation(20));
    pool.reserve(SLOT, Generation(21));
    pool.set_holders(SLOT, 1 << 3);
    pool.write(SLOT.offset(), &bytes);
    let record = BirthRecord { generation: worker.generation(SLOT), length: entry.length, checksum: entry.checksum };
    worker.write_birth(SLOT, 0, &record).unwrap();
    assert_eq!(pool.birth(SLOT, 0), Some(record));
    pool.ready(SLOT, Generation(21), &entry);
    pool.set_holders(SLOT, 0);
    end_work();
}

/// Bytes of the files that show the progress of the store above.
struct Watched {
    files: Vec<(File, u64, usize)>,
}

impl Watched {
    fn new(home: &Home) -> Watched {
        let page = u64::from(SLOT.0);
        let birth = format::birth_at(&Geometry::new(2 * MIB, None).unwrap(), SLOT, 0);
        Watched {
            files: vec![
                (home.file("table"), format::ENTRIES_AT + page * format::ENTRY_BYTES, format::ENTRY_BYTES as usize),
                (home.file("generation"), format::GENERATIONS_AT + page * 4, 4),
                (home.file("birth"), birth, format::BIRTH_BYTES as usize),
                (home.file("data"), SLOT.offset(), 600),
            ],
        }
    }

    fn bytes(&self) -> Vec<u8> {
        let mut all = Vec::new();
        for (file, at, len) in &self.files {
            let start = all.len();
            all.resize(start + len, 0);
            file.read_exact_at(&mut all[start..], *at).unwrap();
        }
        all
    }
}

/// What a daemon that starts after the crash finds. Panics if the rules do not allow it.
fn judge(home: &Home) -> &'static str {
    let image = image_of(home.path());
    let opened = image.open(2 * MIB);
    assert!(matches!(opened.outcome, Outcome::Recovered { .. }), "{:?}", opened.outcome);
    let pool = &opened.pool;
    let slots = recovered(pool);
    assert_eq!(block_in(pool, &slots[0]), Some(block(9).0), "a neighbour was harmed");
    let slot = slots[SLOT.0 as usize];
    assert_eq!(pool.generation(SLOT), slot.generation);
    assert!(pool.first_generation().0 > slot.generation.0);
    let mut bytes = vec![0; 600];
    pool.read(SLOT.offset(), &mut bytes);
    let holds = [OLD, NEW].into_iter().find(|number| block(*number).1 == bytes);
    match slot.state {
        SlotState::Ready(_) => {
            // Compares the payload with the entry's checksum.
            let entry = block_in(pool, &slot).unwrap();
            let number = [OLD, NEW].into_iter().find(|number| block(*number).0 == entry).expect("nobody stored this");
            assert_eq!(holds, Some(number));
            assert_eq!(slot.generation, Generation(if number == OLD { 7 } else { 21 }));
            if number == OLD { "old" } else { "new" }
        }
        state => {
            let is_touched = holds != Some(OLD);
            assert!(!is_touched || state == SlotState::Reserved { epoch: 2 }, "written to while {state:?}");
            assert!(!is_touched || slot.holders == 1 << 3, "written to by nobody on record");
            assert!(slot.generation != Generation(7), "a loader of the old block could not tell that it is gone");
            match state {
                SlotState::Reserved { .. } => "reserved",
                SlotState::Free => "free",
                _ => "torn",
            }
        }
    }
}

#[test]
fn a_crash_at_any_instruction_of_a_store_leaves_the_old_block_the_new_one_or_none() {
    let home = Home::alone();
    let pool = home.pool(2 * MIB);
    with_extent(&pool, 4096);
    store(&pool, SlotId(0), 6, 9);
    store(&pool, SLOT, 7, OLD);
    drop(pool);
    let traced = Traced::seize(act("store", home.path(), false));
    let watched = Watched::new(&home);
    let (mut last, mut seen, mut images, mut steps) = (watched.bytes(), BTreeSet::from([judge(&home)]), 1, 0);
    while traced.advance(Step::Instruction) {
        steps += 1;
        let now = watched.bytes();
        if now != last {
            last = now;
            images += 1;
            seen.insert(judge(&home));
        }
    }
    println!("{steps} instructions, {images} images");
    assert_eq!(judge(&home), "new");
    assert_eq!(seen, BTreeSet::from(["old", "torn", "free", "reserved", "new"]));
}

/// Opens a pool of the size that the test gives; the test kills it on the way.
pub fn play_open(socket: &UnixStream, directory: &Path) {
    let capacity_bytes: u64 = String::from_utf8(recv_fds(socket, soon()).unwrap().0).unwrap().parse().unwrap();
    let config =
        PoolConfig { directory: directory.to_owned(), capacity_bytes, unit_bytes: None, huge_pages: HugePages::Off };
    begin_work(socket);
    let pool = Pool::open(&config);
    end_work();
    drop(pool);
}

/// Opens a pool of `capacity_bytes` in a child, and calls `judge` with an image at each of its system calls.
fn kill_while_opening(home: &Home, capacity_bytes: u64, judge: impl FnMut(Home)) {
    let actor = act("open", home.path(), false);
    actor.say(&capacity_bytes.to_string(), &[]);
    let images = kill_at_each_call(home, actor, judge);
    assert!(images > 20, "only {images} system calls were seen");
}

fn kill_at_each_call(home: &Home, actor: Actor, mut judge: impl FnMut(Home)) -> u32 {
    let traced = Traced::seize(actor);
    let mut images = 0;
    while traced.advance(Step::SystemCall) {
        judge(image_of(home.path()));
        images += 1;
    }
    judge(image_of(home.path()));
    images
}

fn engine(name: &str) -> InstanceRecord {
    let number = name.len() as u32;
    InstanceRecord { engine_id: name.as_bytes().to_vec(), ranks: number, incarnation: number.into(), owner: 7 }
}

/// Of a namespace, from the disks and perhaps from the pool.
fn purge(pool: bool) -> PurgeRecord {
    PurgeRecord { namespace: NamespaceId(2), places: PurgePlaces { pool, disks: true } }
}

fn ended(time: u64) -> EndedPurge {
    EndedPurge { namespace: NamespaceId(2), time }
}

/// Replaces an instance and a namespace, creates an extent and removes it, and purges the namespace twice.
pub fn play_records(socket: &UnixStream, directory: &Path) {
    let config = PoolConfig {
        directory: directory.to_owned(),
        capacity_bytes: 4 * MIB,
        unit_bytes: None,
        huge_pages: HugePages::Off,
    };
    let pool = Pool::open(&config).unwrap().pool;
    pool.populate_unit(1).unwrap();
    begin_work(socket);
    pool.set_instance(Instance(5), &engine("new")).unwrap();
    pool.set_instance(Instance(5), &engine("newest")).unwrap();
    pool.set_namespace(7, NamespaceId(2), "new", Some(7), b"new layout").unwrap();
    pool.set_extent(&Extent { first_unit: 1, units: 1, slot_bytes: 8192 }).unwrap();
    pool.clear_extent(1).unwrap();
    pool.set_purge(3, &purge(true)).unwrap();
    pool.set_purge(3, &purge(false)).unwrap();
    pool.set_ended_purge(3, &ended(100)).unwrap();
    pool.clear_purge(3).unwrap();
    pool.set_met_disks().unwrap();
    pool.set_ended_purge(3, &ended(200)).unwrap();
    end_work();
}

#[test]
fn a_crash_at_any_call_while_records_change_leaves_an_old_or_new_instance_and_at_worst_no_namespace() {
    let home = Home::alone();
    let pool = home.pool(4 * MIB);
    let extent = with_extent(&pool, 4096);
    store(&pool, SLOT, 7, OLD);
    pool.set_instance(Instance(5), &engine("older")).unwrap();
    pool.set_namespace(7, NamespaceId(1), "older", None, b"older layout").unwrap();
    drop(pool);
    let (mut seen, mut purges, mut of_ended) = (BTreeSet::new(), Vec::new(), Vec::new());
    kill_at_each_call(&home, act("records", home.path(), false), |image| {
        let pool = image.pool(4 * MIB);
        assert_eq!(block_in(&pool, &recovered(&pool)[SLOT.0 as usize]), Some(block(OLD).0));
        let instances = pool.instances().unwrap();
        assert!(
            [engine("older"), engine("new"), engine("newest")].map(|its| vec![(Instance(5), its)]).contains(&instances)
        );
        let namespace =
            pool.namespaces().unwrap().pop().map(|(_, record)| (record.id.0, record.descriptor, record.layout));
        let either = [(1, "older", "older layout"), (2, "new", "new layout")]
            .map(|(id, name, layout)| Some((id, name.to_owned(), layout.as_bytes().to_vec())));
        assert!(namespace.is_none() || either.contains(&namespace), "{namespace:?}");
        purges.extend(pool.purges().unwrap());
        of_ended.push((pool.ended_purges().unwrap(), pool.has_met_disks().unwrap()));
        let extents = pool.recovered_extents();
        assert!(extents[0] == extent && pool.unreadable_units().is_empty());
        seen.insert((instances.first().map(|(_, record)| record.ranks), namespace.map(|(id, ..)| id), extents.len()));
    });
    let expected = [
        (Some(5), Some(1), 1),
        (Some(3), Some(1), 1),
        (Some(6), Some(1), 1),
        (Some(6), None, 1),
        (Some(6), Some(2), 1),
        (Some(6), Some(2), 2),
    ];
    assert_eq!(seen, BTreeSet::from(expected));
    purges.dedup();
    assert_eq!(purges, [(3, purge(true)), (3, purge(false))]);
    of_ended.dedup();
    let at = |time| vec![(3, ended(time))];
    assert_eq!(of_ended, [(vec![], false), (at(100), false), (at(100), true), (at(200), true)]);
}

#[test]
fn a_crash_at_any_call_while_a_pool_is_made_leaves_one_that_can_be_made() {
    let home = Home::alone();
    let mut outcomes = BTreeSet::new();
    kill_while_opening(&home, 2 * MIB, |image| {
        let opened = image.open(2 * MIB);
        outcomes.insert(match opened.outcome {
            Outcome::Created => "created",
            Outcome::Recovered { .. } => "recovered",
            Outcome::Replaced { .. } => "replaced",
        });
        with_extent(&opened.pool, 4096);
        store(&opened.pool, SlotId(0), 1, 1);
    });
    assert_eq!(outcomes, BTreeSet::from(["created", "recovered", "replaced"]));
}

#[test]
fn a_crash_at_any_call_while_a_pool_grows_loses_no_block() {
    let home = Home::alone();
    let pool = home.pool(2 * MIB);
    with_extent(&pool, 4096);
    store(&pool, SLOT, 7, OLD);
    drop(pool);
    let mut grown = BTreeSet::new();
    kill_while_opening(&home, 6 * MIB, |image| {
        let opened = image.open(6 * MIB);
        let Outcome::Recovered { grown_by_units, .. } = opened.outcome else { panic!("{:?}", opened.outcome) };
        grown.insert(grown_by_units);
        assert_eq!(block_in(&opened.pool, &recovered(&opened.pool)[SLOT.0 as usize]), Some(block(OLD).0));
        opened.pool.populate_unit(2).unwrap();
    });
    assert_eq!(grown, BTreeSet::from([0, 2]));
}

#[test]
fn a_crash_at_any_call_while_a_pool_is_replaced_leaves_the_old_one_or_an_empty_one() {
    let home = Home::alone();
    let pool = home.pool(6 * MIB);
    with_extent(&pool, 4096);
    store(&pool, SLOT, 7, OLD);
    pool.set_purge(0, &purge(true)).unwrap();
    drop(pool);
    let mut blocks = BTreeSet::new();
    kill_while_opening(&home, 2 * MIB, |image| {
        // A daemon with the old configuration, so that leftovers of the old pool show.
        let opened = image.open(6 * MIB);
        let worker = Mapping::new(opened.pool.mapper_fds(Instance(0), 0).unwrap(), &opened.pool.description()).unwrap();
        assert!(!worker.is_retired());
        let slots = recovered(&opened.pool);
        let found = slots.iter().filter_map(|slot| block_in(&opened.pool, slot)).collect::<Vec<_>>();
        assert!(found.is_empty() || found == [block(OLD).0], "{found:?}");
        assert_eq!(opened.pool.purges().unwrap(), [(0, purge(true))], "the disks keep their blocks");
        blocks.insert(found.len());
    });
    assert_eq!(blocks, BTreeSet::from([0, 1]));
}
