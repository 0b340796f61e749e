//! A client that may connect and says what it likes, in calls and on the attach socket; and a pool's files that say
//! what they like to the daemon that recovers them.
//!
//! A case is a script of messages to a daemon that has just started. Not here: HTTP/2, which is hyper's, and what lies
//! before a message is decoded (`crates/cli/tests/hostile.rs`, `clients.rs`).

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use forebay_core::Core;
use forebay_core::checksum::checksum;
use forebay_fuzz::Target;
use forebay_io::pool::Pool;
use forebay_rpc::PROTOCOL_VERSION;
use forebay_rpc::proto::*;
use prost::Message;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::{Semaphore, mpsc};

use crate::clients::{Clients, Limits};
use crate::config::{Bytes, Config, HugePages};
use crate::insight::{Insight, Present};
use crate::serve::{assemble, core_config, pool_config};
use crate::service::{copying, hint, lookup, purge, session, store};
use crate::state::{Shared, ToMove, ToVerify};
use crate::tasks::attach::{self, Attached};
use crate::tasks::{relocate, verify};

const UNIT_BYTES: u64 = 2 << 20;
const UNITS: u32 = 2;
const BLOCK_BYTES: usize = 5000;
pub(super) const USER: u32 = 1000;

pub(super) struct Daemon {
    pub(super) shared: Shared,
    pub(super) clients: Arc<Clients>,
    pub(super) runtime: Runtime,
    to_verify: mpsc::UnboundedReceiver<ToVerify>,
    to_move: mpsc::UnboundedReceiver<ToMove>,
}

impl Daemon {
    pub(super) fn start(directory: &Path) -> Result<Daemon, String> {
        static INSIGHT: OnceLock<Insight> = OnceLock::new();
        let mut config = Config::default();
        config.pool.directory = directory.to_owned();
        config.pool.capacity_bytes = Bytes(u64::from(UNITS) * UNIT_BYTES);
        config.pool.unit_bytes = Some(Bytes(UNIT_BYTES));
        config.pool.huge_pages = HugePages::Off;
        let opened = Pool::open(&pool_config(&config)).map_err(said)?;
        let mut core = core_config(&config, &opened.pool);
        (core.seed, core.memory_entries, core.table_bits) = (7, 64, 2);
        let clients = Clients::new(Limits::of(&config, config.limits.connections_per_user as usize));
        let runtime = Builder::new_current_thread().enable_time().start_paused(true).build().expect("a runtime");
        let insight = INSIGHT.get_or_init(|| Insight::new(1, Present::of_pool(1 << 20)).0).clone();
        let guard = runtime.enter();
        let (shared, to_verify, to_move) = assemble(config, Core::new(core), opened, 1, insight).map_err(said)?;
        let pool = shared.lock().table.pool().clone();
        for unit in 0..UNITS {
            pool.populate_unit(unit).expect("the machine has memory for the pool");
            shared.event(|state| state.core.populate(unit));
        }
        drop(guard);
        Ok(Daemon { shared, clients, runtime, to_verify, to_move })
    }

    /// What the daemon's threads do between two calls.
    fn work_off(&mut self) {
        let _guard = self.runtime.enter();
        let pool = self.shared.lock().table.pool().clone();
        while self.shared.event(|state| state.core.step()) {}
        while let Ok(asked) = self.to_verify.try_recv() {
            let verdict = verify::verify(&pool, &asked);
            self.shared.event(|state| verify::end(state, &asked, verdict));
        }
        while let Ok(to_move) = self.to_move.try_recv() {
            let is_copied = relocate::copy(&pool, &to_move);
            self.shared.event(|state| relocate::end(state, &to_move, is_copied));
        }
    }

    /// The books agree, whatever was said.
    fn check(&self) {
        let mut cursor = Some(0);
        while let Some(from) = cursor {
            cursor = self.shared.event(|state| {
                state.core.audit_records(from, 64).expect("the records of blocks agree");
                let (piece, next) = state.core.audit_piece(from, 64);
                piece.iter().for_each(|block| state.core.audited(block.block, true));
                next
            });
        }
        self.shared.lock().core.audit_counters().expect("the counters agree");
    }
}

/// What stays open while a script goes on.
#[derive(Default)]
struct Open {
    streams: Vec<Box<dyn std::any::Any>>,
    attached: Vec<(Attached, mpsc::Receiver<()>)>,
}

pub(super) fn home() -> tempfile::TempDir {
    tempfile::Builder::new().prefix("forebay-test-").tempdir_in("/dev/shm").unwrap()
}

/// One message of a script: which call, how long, and its bytes.
fn say(script: &mut Vec<u8>, call: u8, message: &impl Message) {
    let body = message.encode_to_vec();
    script.push(call);
    script.extend((body.len() as u16).to_le_bytes());
    script.extend(body);
}

/// As on the attach socket, with its length before it.
fn say_framed(script: &mut Vec<u8>, call: u8, message: &impl Message) {
    let body = message.encode_to_vec();
    script.push(call);
    script.extend((body.len() as u16 + 4).to_le_bytes());
    script.extend((body.len() as u32).to_le_bytes());
    script.extend(body);
}

/// The messages of a script, however long they say that they are.
fn messages(mut script: &[u8]) -> Vec<(u8, &[u8])> {
    let mut found = Vec::new();
    while let Some(([call, length @ ..], rest)) = script.split_first_chunk::<3>() {
        let (body, behind) = rest.split_at(rest.len().min(u16::from_le_bytes(*length).into()));
        found.push((*call, body));
        script = behind;
    }
    found
}

fn open_session(ranks: u32) -> OpenSessionRequest {
    OpenSessionRequest {
        protocol: PROTOCOL_VERSION,
        engine_id: "engine".to_owned(),
        ranks,
        incarnation: vec![1; 16],
        owner: vec![2; 16],
        ..OpenSessionRequest::default()
    }
}

fn open_namespace(rank_bytes: &[u64]) -> OpenNamespaceRequest {
    let group = |group, attention: Attention| Group {
        group,
        attention: attention.into(),
        tokens_per_block: 16,
        is_replicated: false,
        rank_bytes: rank_bytes.to_vec(),
        window_blocks: if attention == Attention::Windowed { 2 } else { 0 },
    };
    OpenNamespaceRequest {
        session: 1,
        fields: [("model".to_owned(), "m".to_owned()), ("tenant".to_owned(), "t".to_owned())].into(),
        groups: vec![group(0, Attention::Full), group(1, Attention::Windowed)],
    }
}

fn hash(number: u8) -> Vec<u8> {
    vec![number; 8]
}

fn block(number: u8) -> Vec<u8> {
    (0..BLOCK_BYTES).map(|at| (at * 31 + usize::from(number) * 7) as u8).collect()
}

fn put(numbers: Range<u8>) -> PutRequest {
    let blocks = numbers.clone().map(|number| Block { hash: hash(number), data: block(number) }).collect();
    let predecessor = numbers.start.checked_sub(1).map_or(Vec::new(), hash);
    PutRequest { session: 1, namespace: 0, group: 0, predecessor, blocks, lent: None }
}

fn keys(numbers: Range<u8>) -> GroupKeys {
    GroupKeys { group: 0, hash_bytes: 8, hashes: numbers.flat_map(hash).collect() }
}

/// A client that copies.
fn client() -> Vec<u8> {
    let mut script = Vec::new();
    say(&mut script, 0, &open_session(0));
    say(&mut script, 1, &open_namespace(&[3000, 2000]));
    say(&mut script, 8, &put(0..3));
    say(&mut script, 2, &LookupRequest { session: 1, namespace: 0, groups: vec![keys(0..4)] });
    let GroupKeys { group, hash_bytes, hashes } = keys(0..4);
    say(&mut script, 9, &GetRequest { session: 1, namespace: 0, group, hash_bytes, hashes, lent: None });
    say(&mut script, 10, &PurgeRequest { tenant: "t".to_owned(), ..PurgeRequest::default() });
    script
}

/// An engine of two ranks. Its slots are the first two of the pool, of the first two generations.
fn engine() -> Vec<u8> {
    let mut script = Vec::new();
    say(&mut script, 0, &open_session(2));
    for rank in 0..2 {
        let groups = [0, 1].map(|group| RankGroup { group, bytes: 2500, is_replicated: false }).to_vec();
        let request = AttachRequest {
            protocol: PROTOCOL_VERSION,
            engine_id: "engine".to_owned(),
            ranks: 2,
            rank,
            groups,
            incarnation: vec![1; 16],
            ..AttachRequest::default()
        };
        say_framed(&mut script, 11, &request);
    }
    let ack = WorkerSays { says: Some(worker_says::Says::Ack(AttachAck {})) };
    (0..2).for_each(|_| say_framed(&mut script, 12, &ack));
    say(&mut script, 1, &open_namespace(&[]));
    say(&mut script, 5, &ReserveRequest { session: 1, namespace: 0, group: 0, count: 3 });
    let blocks = GroupBlocks {
        group: 0,
        hash_bytes: 8,
        hashes: (0..2).flat_map(hash).collect(),
        predecessor: Vec::new(),
        slots: vec![0, 2],
        generations: vec![1, 2],
    };
    say(&mut script, 6, &CommitRequest { session: 1, namespace: 0, groups: vec![blocks] });
    say(&mut script, 2, &LookupRequest { session: 1, namespace: 0, groups: vec![keys(0..4)] });
    let hints = vec![QueueHint { request: 7, groups: vec![keys(0..4)] }];
    say(&mut script, 3, &HintRequest { session: 1, namespace: 0, withdrawn: vec![6], hints });
    say(&mut script, 4, &ReleaseRequest { session: 1, leases: vec![1], lookups: vec![1], ..ReleaseRequest::default() });
    let held = vec![Held { slot: 4, generation: 3 }];
    say(&mut script, 7, &AbortRequest { session: 1, slots: held.clone(), are_unused: false });
    let suspects = WorkerSays { says: Some(worker_says::Says::Suspects(Suspects { slots: held.clone() })) };
    say_framed(&mut script, 12, &suspects);
    let registered = WorkerSays { says: Some(worker_says::Says::Registered(Registered { bytes: 1 << 20 })) };
    say_framed(&mut script, 12, &registered);
    say(&mut script, 0, &OpenSessionRequest { leases: held.clone(), reservations: held, ..open_session(2) });
    script
}

/// What is wrong, without the facts: those are as many as there are inputs.
fn said(error: forebay_core::Error) -> String {
    error.to_string().split(" (").next().unwrap_or_default().to_owned()
}

/// Decodes a message as the service does, says it, and returns what tells answers apart.
fn hear(daemon: &Daemon, open: &mut Open, call: u8, body: &[u8]) -> Result<usize, String> {
    fn read<M: Message + Default>(body: &[u8]) -> Result<M, String> {
        let message = M::decode(body).map_err(|_| "it cannot be decoded".to_owned())?;
        assert_eq!(M::decode(&message.encode_to_vec()[..]).as_ref().map(M::encoded_len), Ok(message.encoded_len()));
        Ok(message)
    }
    let shared = &daemon.shared;
    let place = daemon.clients.enter(USER);
    let places = Arc::new(Semaphore::new(8));
    let run = |call: std::pin::Pin<Box<dyn Future<Output = forebay_core::Result<usize>> + '_>>| {
        let done = daemon.runtime.block_on(async { tokio::time::timeout(Duration::from_secs(3600), call).await });
        done.expect("a call ends").map_err(said)
    };
    match call {
        0 => {
            let request = read(body)?;
            let stream = daemon.runtime.block_on(session::open(shared, &place, request));
            open.streams.push(Box::new(stream.map_err(said)?));
            Ok(0)
        }
        1 => {
            let request = read(body)?;
            run(Box::pin(async {
                session::open_namespace(shared, USER, request).map(|reply| reply.namespace as usize)
            }))
        }
        2 => {
            let request = read(body)?;
            let replies = daemon.runtime.block_on(lookup::lookup(shared, &places, request));
            open.streams.push(Box::new(replies.map_err(said)?));
            Ok(0)
        }
        3 => {
            let request = read(body)?;
            run(Box::pin(async { hint::hint(shared, request).await.map(|_| 0) }))
        }
        4 => {
            let request = read(body)?;
            run(Box::pin(async { lookup::release(shared, request).await.map(|_| 0) }))
        }
        5 => {
            let request = read(body)?;
            run(Box::pin(async { store::reserve(shared, request).await.map(|reply| reply.slots.len().min(8)) }))
        }
        6 => {
            let request = read(body)?;
            let outcomes = |reply: CommitReply| {
                reply.outcomes.iter().fold(0usize, |all, one| all.wrapping_mul(5).wrapping_add(*one as usize))
            };
            run(Box::pin(async move { store::commit(shared, request).await.map(outcomes) }))
        }
        7 => {
            let request = read(body)?;
            run(Box::pin(async { store::abort(shared, request).await.map(|_| 0) }))
        }
        8 => {
            let request = read(body)?;
            run(Box::pin(async { copying::put(shared, &place, request).await.map(|reply| reply.outcomes.len()) }))
        }
        9 => {
            let request = read(body)?;
            run(Box::pin(async { copying::get(shared, &place, request).await.map(|(reply, _)| reply.blocks.len()) }))
        }
        10 => {
            let request = read(body)?;
            run(Box::pin(async { purge::purge(shared, request).await.map(|reply| reply.purged_blocks as usize) }))
        }
        11 => attach(daemon, open, body),
        12 => worker_says(daemon, open, body),
        _ => Err("there is no such call".to_owned()),
    }
}

fn attach(daemon: &Daemon, open: &mut Open, body: &[u8]) -> Result<usize, String> {
    let mut heard = body.to_vec();
    let Some(request) = attach::take_message::<AttachRequest>(&mut heard).map_err(said)? else {
        return Err("it is not whole".to_owned());
    };
    let (ready, all_there) = mpsc::channel(1);
    let _guard = daemon.runtime.enter();
    let welcomed = daemon.shared.event(|state| attach::welcome(state, USER, &request, ready)).map_err(said)?;
    let (instance, connection) = (welcomed.instance, welcomed.connection);
    open.attached
        .push((Attached { shared: daemon.shared.clone(), instance, rank: request.rank, connection }, all_there));
    daemon.shared.event(|state| attach::wake_if_all_there(state, instance));
    let mut told = 0;
    for (attached, woken) in &mut open.attached {
        if woken.try_recv().is_ok() {
            let slices = daemon.shared.event(|state| attach::slices(state, attached.instance, attached.rank));
            told += slices.map_err(said)?.len();
        }
    }
    Ok(told)
}

fn worker_says(daemon: &Daemon, open: &mut Open, body: &[u8]) -> Result<usize, String> {
    let (mut heard, mut acks) = (body.to_vec(), 0);
    let _guard = daemon.runtime.enter();
    while let Some(message) = attach::take_message::<WorkerSays>(&mut heard).map_err(said)? {
        for (attached, _) in &open.attached {
            match &message.says {
                Some(worker_says::Says::Suspects(suspects)) => {
                    attach::suspect(attached, &suspects.slots).map_err(said)?
                }
                Some(worker_says::Says::Registered(registered)) => {
                    attach::note_registered(attached, registered.bytes).map_err(said)?
                }
                Some(worker_says::Says::Ack(_)) | None => {
                    daemon.shared.event(|state| attach::acknowledge(state, attached));
                    acks += 1;
                }
            }
        }
    }
    Ok(acks.min(4))
}

#[test]
fn whatever_a_client_says_the_daemon_answers_and_its_books_agree() {
    let scripts = vec![client(), engine()];
    let directory = home();
    let run = |script: &[u8]| {
        let pool = directory.path().join("pool");
        let _ = forebay_io::pool::remove(&pool);
        let mut daemon = Daemon::start(&pool).expect("a daemon starts on nothing");
        let (mut open, mut answers) = (Open::default(), Vec::new());
        for (call, body) in messages(script).into_iter().take(40) {
            answers.push((call, hear(&daemon, &mut open, call, body)));
            daemon.work_off();
        }
        daemon.check();
        let guard = daemon.runtime.enter();
        drop(open);
        drop(guard);
        daemon.work_off();
        daemon.check();
        answers
    };
    for script in &scripts {
        let refused: Vec<_> = run(script).into_iter().filter(|(_, answer)| answer.is_err()).collect();
        assert!(refused.is_empty(), "a script as it was made is taken: {refused:?}");
    }
    Target::new("calls", scripts).cases(600).allocates(200, 4 << 20).run(run);
}

/// Parts of a pool's files: file, and where in it. `docs/formats/pool.md` draws them.
const PIECES: [(&str, Range<u64>); 7] = [
    ("table", 0..72),
    ("table", 20_480..20_496),
    ("table", 1 << 20..(1 << 20) + 4 * 128),
    ("table", 4096..4096 + 256),
    ("generation", 0..32),
    ("generation", 4096..4096 + 8 * 4),
    ("namespace", 0..500),
];

fn reseal(bytes: &mut [u8]) {
    let put = |bytes: &mut [u8], at: usize, sum: u64| bytes[at..at + 8].copy_from_slice(&sum.to_le_bytes());
    let mut end = 0;
    for (number, (_, place)) in PIECES.iter().enumerate() {
        let begin = end;
        end += (place.end - place.start) as usize;
        let Some(piece) = bytes.get_mut(begin..end) else { return };
        match number {
            0 => {
                let mut sealed = piece[..40].to_vec();
                sealed[12..16].fill(0);
                put(piece, 40, checksum(&sealed));
                for at in [48, 56, 64] {
                    let number: [u8; 4] = piece[at..at + 4].try_into().unwrap();
                    piece[at + 4..at + 8].copy_from_slice(&number.map(|byte| !byte));
                }
            }
            1 => {
                for unit in 0..2 {
                    let mut body: [u8; 8] = piece[unit * 8..unit * 8 + 8].try_into().unwrap();
                    body[6..].fill(0);
                    let sum = checksum(&[&(unit as u32).to_le_bytes()[..], &body].concat()) as u16;
                    if body != [0; 8] {
                        piece[unit * 8 + 6..unit * 8 + 8].copy_from_slice(&sum.to_le_bytes());
                    }
                }
            }
            2 => {
                for (index, entry) in piece.chunks_exact_mut(128).enumerate() {
                    // Slots of two pages, in the first unit.
                    let sum = checksum(&[&(index as u32 * 2).to_le_bytes()[..], &entry[..4], &entry[24..120]].concat());
                    put(entry, 120, sum);
                }
            }
            6 => {
                let length = |at: usize| u32::from_le_bytes(piece[at..at + 4].try_into().unwrap()) as usize;
                let end = length(32).saturating_add(length(36)).saturating_add(64);
                if let Some(sealed) = piece.get(16..end) {
                    let sum = checksum(sealed);
                    put(piece, 8, sum);
                }
            }
            _ => {}
        }
    }
}

/// The pool's files as a daemon left them that has stored blocks: their lengths, and the bytes of the first 2 MiB of
/// each.
fn left_behind(pool: &Path) -> Vec<(&'static str, u64, Vec<u8>)> {
    let mut daemon = Daemon::start(pool).expect("a daemon starts on nothing");
    let mut open = Open::default();
    for (call, body) in messages(&client()).into_iter().take(3) {
        hear(&daemon, &mut open, call, body).expect("a script as it was made is taken");
        daemon.work_off();
    }
    // As a kill leaves them, not as the end of the session does.
    let read = |name: &'static str| {
        let file = File::open(pool.join(name)).unwrap();
        let length = file.metadata().unwrap().len();
        let mut bytes = vec![0; length.min(2 << 20) as usize];
        file.read_exact_at(&mut bytes, 0).unwrap();
        let used = bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
        bytes.truncate(used);
        (name, length, bytes)
    };
    let left = ["table", "generation", "birth", "namespace", "data"].map(read).to_vec();
    let _guard = daemon.runtime.enter();
    drop(open);
    left
}

fn recover(name: &'static str, is_mended: bool) {
    use std::os::unix::fs::OpenOptionsExt;
    let directory = home();
    let pool = directory.path().join("pool");
    let left = left_behind(&pool);
    let of = |name: &str| &left.iter().find(|(file, ..)| *file == name).expect("a pool has its files").2;
    let piece = |(name, place): &(&str, Range<u64>)| {
        let mut bytes = of(name).get(place.start as usize..).unwrap_or(&[]).to_vec();
        bytes.resize((place.end - place.start) as usize, 0);
        bytes
    };
    let input: Vec<u8> = PIECES.iter().flat_map(piece).collect();
    let run = |bytes: &[u8]| {
        let mut rest = bytes;
        for (name, length, whole) in &left {
            let path = pool.join(name);
            let _ = std::fs::remove_file(&path);
            let file = File::options().write(true).create_new(true).mode(0o600).open(path).unwrap();
            file.set_len(*length).unwrap();
            file.write_all_at(whole, 0).unwrap();
        }
        for (name, place) in &PIECES {
            let some;
            (some, rest) = rest.split_at(rest.len().min((place.end - place.start) as usize));
            File::options().write(true).open(pool.join(name)).unwrap().write_all_at(some, place.start).unwrap();
        }
        let mut daemon = Daemon::start(&pool)?;
        daemon.check();
        let (mut open, mut there) = (Open::default(), 0);
        for (call, body) in messages(&client()).into_iter().take(2) {
            hear(&daemon, &mut open, call, body)?;
        }
        for number in 0..3 {
            let GroupKeys { group, hash_bytes, hashes } = keys(number..number + 1);
            let request =
                GetRequest { session: 1, namespace: 0, group, hash_bytes, hashes: hashes.clone(), lent: None };
            for is_last in [false, true] {
                let key = (&hashes[..], hash_bytes as usize);
                let looked = daemon.shared.event(|state| copying::look(state, &request, 0, key, is_last));
                daemon.work_off();
                let Ok(copying::Looked::Found(found)) = looked else { continue };
                let data = copying::read(&daemon.shared, &found);
                daemon.shared.event(|state| copying::give_back(state, &found, data.as_deref()));
                let is_right = data.as_ref().is_none_or(|data| *data == block(number));
                assert!(is_right || is_mended, "block {number} came back as other bytes");
                there += usize::from(data.is_some());
                break;
            }
        }
        hear(&daemon, &mut open, 8, &put(3..5).encode_to_vec())?;
        daemon.work_off();
        daemon.check();
        let _guard = daemon.runtime.enter();
        drop(open);
        Ok::<_, String>(there)
    };
    assert_eq!(run(&input), Ok(3), "the pool as it was left is recovered");
    // A count of use that no later one follows.
    let mut last = input.clone();
    let entries = PIECES[..2].iter().map(|(_, place)| place.end - place.start).sum::<u64>() as usize;
    let end = entries + (PIECES[2].1.end - PIECES[2].1.start) as usize;
    for entry in last[entries..end].chunks_exact_mut(128).filter(|entry| entry[4..8] == *b"REDY") {
        entry[88..96].fill(0xFF);
    }
    reseal(&mut last);
    assert_eq!(run(&last), Ok(3), "a pool whose counts of use are at their end is recovered");
    let target = Target::new(name, vec![input, last]).cases(400).allocates(64, 16 << 20);
    let target = if is_mended { target.mended(reseal) } else { target };
    target.run(run);
}

#[test]
fn whatever_happened_to_a_pool_the_next_daemon_serves_what_was_stored_or_less() {
    recover("recovery", false);
}

#[test]
fn whatever_a_pool_says_under_right_checksums_the_next_daemon_starts_or_says_why_not() {
    recover("forged recovery", true);
}
