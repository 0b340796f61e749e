//! Whether a daemon answers at the socket, speaks our protocol, and gives back what was stored.

use std::io::ErrorKind as Io;
use std::net::SocketAddr;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::time::{Duration, Instant};

use forebay_core::{Error, ErrorKind, Result};
use forebay_daemon::config::{Config, HttpAddress};
use forebay_daemon::http::{bind, is_forebay};
use forebay_io::trust::{self, Holds};
use forebay_rpc::client::{Trial, connect, knock};
use forebay_rpc::proto::{
    Block, ClassInfo, CommitOutcome, GetRequest, Group, HealthCheck, NodeBytes, PutRequest, SessionInfo, TierInfo,
    UserInfo,
};
use forebay_rpc::{PROTOCOL_VERSION, RPC_SOCKET, from_status};

use super::Check;
use crate::client;
use crate::output::{escaped, size};

/// What a running daemon says of its pool.
pub struct Holdings {
    pub capacity_bytes: u64,
    pub populated_bytes: u64,
    pub huge_bytes: u64,
    /// Where its memory lies, on a host with several NUMA nodes.
    pub nodes: Vec<NodeBytes>,
}

/// Everything found at the socket.
pub struct Findings {
    pub checks: Vec<Check>,
    /// None without a daemon.
    pub holdings: Option<Holdings>,
    /// None without a daemon.
    pub tiers: Option<Vec<TierInfo>>,
    /// Whether somebody listens there, and does not answer: a daemon that may have what it is configured to use.
    pub is_silent: bool,
}

/// Asks the daemon whose sockets lie in the configured directory. If there is none: whether one could listen here.
pub async fn examine(config: &Config) -> Findings {
    let directory = &config.socket.directory;
    let path = directory.join(RPC_SOCKET);
    let check = match forebay_rpc::client::socket(directory, RPC_SOCKET) {
        Err(error) if error.kind() == ErrorKind::Invalid => Check::failed("socket", &error),
        Ok(_) | Err(_) => socket(&path, knock(&path)),
    };
    // Without a daemon: whether one could be started here.
    let check = match trust::check_directory(directory, Holds::Sockets) {
        Err(error) if check.verdict == super::Verdict::Warn => Check::failed("socket", &error),
        _ => check,
    };
    if check.verdict != super::Verdict::Ok {
        // A directory that is closed to this user does not say whether there is a socket.
        let is_absent = path.symlink_metadata().is_err_and(|error| error.kind() == Io::NotFound);
        let is_closed = check.verdict == super::Verdict::Fail && !is_absent;
        let checks = vec![check, users(&config.socket.allow_uids), http(config.http.address, is_closed).await];
        return Findings { checks, holdings: None, tiers: None, is_silent: false };
    }
    let mut client = client::connect(directory);
    let reply = match client.inspect().await {
        Ok(reply) => reply,
        Err(error) => {
            let checks = vec![check, Check::failed("daemon", &error)];
            return Findings { checks, holdings: None, tiers: None, is_silent: error.kind() == ErrorKind::Timeout };
        }
    };
    let files = client.health().await.map_or_else(|_| Vec::new(), |health| files(&health.ready, &reply.pool_trouble));
    let holdings = Holdings {
        capacity_bytes: reply.capacity_bytes,
        populated_bytes: reply.populated_bytes,
        huge_bytes: reply.huge_bytes,
        nodes: reply.nodes,
    };
    let engines = engines(&reply.sessions);
    let registered = registered(&reply.sessions, reply.populated_bytes);
    let [versions, self_test] = self_test(directory, &reply.classes).await;
    let cores = cores(Duration::from_micros(reply.core_wait_us), reply.runs, reply.core_quota);
    let checks = [check, versions, self_test, engines].into_iter().chain(registered);
    let checks = checks.chain(files).chain([limits(&reply.users), cores]).collect();
    Findings { checks, holdings: Some(holdings), tiers: Some(reply.tiers), is_silent: false }
}

/// What became of the daemon's own files: those of its disks, and the pool's where nothing else is wrong with the pool.
fn files(ready: &[HealthCheck], pool_trouble: &str) -> Vec<Check> {
    let is_of_files = |check: &&HealthCheck| check.name == "disks" || check.name == "pool" && pool_trouble.is_empty();
    let wrong = ready.iter().filter(|check| check.finding == "warn").filter(is_of_files);
    let judged = |check: &HealthCheck| {
        let (finding, hint) = check.why.split_once("; hint: ").unwrap_or((&check.why, "see the daemon's log"));
        Check::warn("files", escaped(finding), escaped(hint))
    };
    wrong.map(judged).collect()
}

/// `connected` is what came of an attempt to connect to `path`.
fn socket(path: &Path, connected: std::io::Result<()>) -> Check {
    let shown = path.display();
    let start = "start a daemon with `forebay serve`; doctor then checks its replies and runs the self-test";
    match connected {
        Ok(()) => Check::ok("socket", format!("a daemon listens at `{shown}`")),
        Err(error) if error.kind() == Io::NotFound => {
            Check::warn("socket", format!("no daemon listens at `{shown}`"), start)
        }
        Err(error) if error.kind() == Io::ConnectionRefused && is_socket(path) => Check::warn(
            "socket",
            format!("`{shown}` was left behind by a daemon that has ended"),
            "start a daemon with `forebay serve`, which replaces the socket",
        ),
        Err(error) if error.kind() == Io::ConnectionRefused => Check::fail(
            "socket",
            format!("`{shown}` exists and is not a socket"),
            "remove the file, or set `socket.directory` to another directory",
        ),
        Err(error) if error.kind() == Io::PermissionDenied => Check::fail(
            "socket",
            format!("this user may not open `{shown}`"),
            "run as the daemon's user, or add this user's id to its `socket.allow_uids`",
        ),
        Err(error) => Check::fail("socket", format!("cannot connect to `{shown}`: {error}"), start),
    }
}

/// Who may connect, by name where the host's own file has one.
fn users(allow_uids: &[u32]) -> Check {
    let passwd = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
    let own = rustix::process::geteuid().as_raw();
    let others = allow_uids.iter().copied().filter(|uid| ![0, own].contains(uid));
    let mut named: Vec<String> = [own].into_iter().chain(others).map(|uid| user(&passwd, uid)).collect();
    if own != 0 {
        named.push(user(&passwd, 0));
    }
    Check::ok("users", format!("these may connect to a daemon of this user: {}", named.join(", ")))
}

/// `passwd` is the content of `/etc/passwd`.
fn user(passwd: &str, uid: u32) -> String {
    let id = uid.to_string();
    let name = passwd.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        (fields.nth(1)? == id).then_some(name)
    });
    name.map_or_else(|| format!("{id} (not in `/etc/passwd`)"), |name| format!("{id} ({name})"))
}

/// Whether the pages could be served. `is_closed`: a daemon may listen at a socket that this user may not open.
async fn http(address: HttpAddress, is_closed: bool) -> Check {
    match bind(address).await {
        Ok(None) => Check::ok("http", "`http.address` is `off`, so there are no pages of metrics and health"),
        Ok(Some(listener)) => {
            let free = listener.local_addr().map_or_else(|error| error.to_string(), |address| address.to_string());
            Check::ok("http", format!("`{free}` is free"))
        }
        Err(error) => match address {
            HttpAddress::At(at) if is_forebay(at).await => taken(at, is_closed),
            _ => Check::failed("http", &error),
        },
    }
}

/// The address of a daemon that runs.
fn taken(address: SocketAddr, is_closed: bool) -> Check {
    let finding = format!("a daemon of Forebay that runs already has `{address}`");
    match is_closed {
        true => Check::ok("http", format!("{finding}, as it seems the one whose socket this user may not use")),
        false => Check::fail(
            "http",
            finding,
            "name the `--socket.directory` of that daemon, or set `http.address` to another address for a second one",
        ),
    }
}

fn is_socket(path: &Path) -> bool {
    path.metadata().is_ok_and(|metadata| metadata.file_type().is_socket())
}

/// Engines that came as far as to map the pool. One that does not serve is not seen here, so the hint says what vLLM's
/// connector asks for.
fn engines(sessions: &[SessionInfo]) -> Check {
    let is_attached = |session: &&SessionInfo| session.ranks > 0 && session.attached_ranks == session.ranks;
    match sessions.iter().filter(is_attached).count() {
        0 => Check::warn(
            "engines",
            "no engine has mapped the pool",
            "see the engine's log; vLLM needs `\"kv_role\":\"kv_both\"` and, with `MultiConnector`, \
             `\"kv_load_failure_policy\":\"recompute\"` beside it",
        ),
        1 => Check::ok("engines", "1 engine has mapped the pool"),
        count => Check::ok("engines", format!("{count} engines have mapped the pool")),
    }
}

/// How much of the pool the engines that copy from and to GPUs have registered with the driver. None if there are none.
fn registered(sessions: &[SessionInfo], populated_bytes: u64) -> Option<Check> {
    let told = sessions.iter().filter_map(|session| Some((session, session.registered_bytes?)));
    let (whole, lacking): (Vec<_>, Vec<_>) = told.partition(|(_, bytes)| *bytes >= populated_bytes);
    let lacks = |(session, bytes): &(&SessionInfo, u64)| format!("`{}` {}", escaped(&session.engine_id), size(*bytes));
    match (whole.len(), lacking.as_slice()) {
        (0, []) => None,
        (1, []) => Some(Check::ok("registered", "1 engine has registered the whole pool with its GPU's driver")),
        (count, []) => Some(Check::ok(
            "registered",
            format!("{count} engines have registered the whole pool with their GPUs' driver"),
        )),
        (_, lacking) => Some(Check::warn(
            "registered",
            format!(
                "of the {} of the pool that have memory, engines have registered less with their GPUs' driver: {}",
                size(populated_bytes),
                lacking.iter().map(lacks).collect::<Vec<_>>().join(", "),
            ),
            "copies of the rest go through staging memory, which is slower; an engine that has just mapped the pool is \
             still registering it, and the log of an engine whose driver refuses gives the reason",
        )),
    }
}

/// Users who have reached a limit since the daemon started.
fn limits(users: &[UserInfo]) -> Check {
    let of_user = |user: &UserInfo| {
        let mut refused: Vec<(&String, &u64)> = user.refused.iter().collect();
        refused.sort();
        let told = refused.iter().map(|(limit, count)| format!("`limits.{limit}` {count} times"));
        (!refused.is_empty()).then(|| format!("user {} reached {}", user.uid, told.collect::<Vec<_>>().join(", ")))
    };
    let reached: Vec<String> = users.iter().filter_map(of_user).collect();
    match reached.is_empty() {
        true => Check::ok("limits", "no user has reached a limit since the daemon started"),
        false => Check::warn(
            "limits",
            reached.join("; "),
            "see `forebay inspect` for what the user has now; have it close or read what it opened, or raise the limit",
        ),
    }
}

/// A longer wait for a core, on average, is longer than a lookup takes.
const LONG_WAIT: Duration = Duration::from_millis(1);

/// Whether something keeps the daemon from a core. `waited` is what its deciding thread has waited before all of its
/// `runs`. With a `quota` of cores, the kernel stops all threads of the control group for the rest of each period in
/// which they have used it up, and counts that as such waits: then nobody can tell whether others have the cores too.
fn cores(waited: Duration, runs: u64, quota: f64) -> Check {
    let each = waited / u32::try_from(runs.max(1)).unwrap_or(u32::MAX);
    let told = format!("the daemon waits {:.2} ms on average until it gets a core", each.as_secs_f64() * 1e3);
    let limit = format!("its control group limits it to {quota} cores");
    match (each < LONG_WAIT, quota > 0.0) {
        (true, false) => Check::ok("cores", told),
        (true, true) => Check::ok("cores", format!("{told}; {limit}")),
        (false, false) => Check::warn(
            "cores",
            format!("{told}; other processes have all of them"),
            "give the daemon's service more weight, such as `CPUWeight=1000` in its systemd unit, or a core of its own",
        ),
        (false, true) => Check::warn(
            "cores",
            format!("{told}; {limit}"),
            "raise or remove the limit (`cpu.max` of the group; `CPUQuota=` of a service; the CPU limit of a \
             container), and give the daemon weight instead, such as `CPUWeight=1000`",
        ),
    }
}

/// Opens a trial, which a daemon of another protocol refuses, stores a block in it, reads it back, and ends it: then
/// the daemon must hold nothing of it.
async fn self_test(directory: &Path, classes: &[ClassInfo]) -> [Check; 2] {
    let bytes = block_bytes(classes);
    let outcome = within(open(directory, bytes)).await;
    let trial = match outcome {
        Ok(trial) => trial,
        Err(error) => return [Check::failed("versions", &error), untested()],
    };
    let start = Instant::now();
    let outcome = within(put_and_get(&trial, bytes)).await;
    let ms = start.elapsed().as_secs_f64() * 1e3;
    let ended = trial.end().await;
    let check = match (outcome, ended) {
        (Ok(true), Ok(())) => Check::ok(
            "self-test",
            format!("{} were stored and read back in {ms:.1} ms; nothing of it is left", size(bytes)),
        ),
        (Ok(false), Ok(())) => without_room(classes),
        (Err(error), _) | (_, Err(error)) => Check::failed("self-test", &error),
    };
    [versions(), check]
}

/// A trial evicts nothing, so a pool that is full of blocks has no room for one, and that is well.
fn without_room(classes: &[ClassInfo]) -> Check {
    match classes.iter().any(|class| class.ready > class.pinned) {
        true => Check::ok(
            "self-test",
            "the daemon answers; its pool is full, and no block is evicted for a test, so none was stored",
        ),
        false => Check::warn(
            "self-test",
            "the pool has no room for one block",
            "`forebay inspect` shows what is pinned; raise `pool.capacity_bytes`",
        ),
    }
}

fn versions() -> Check {
    Check::ok("versions", format!("this program and the daemon speak protocol {PROTOCOL_VERSION}"))
}

fn untested() -> Check {
    Check::warn("self-test", "it did not run, because the daemon opened no session", "see the line above")
}

const DEADLINE: Duration = Duration::from_secs(5);

async fn within<T>(run: impl Future<Output = Result<T>>) -> Result<T> {
    let late = || Error::new(ErrorKind::Timeout, "the daemon did not answer the self-test in time");
    let outcome = tokio::time::timeout(DEADLINE, run).await;
    outcome.unwrap_or_else(|_| Err(late().with("deadline_seconds", DEADLINE.as_secs())))
}

async fn open(directory: &Path, bytes: u64) -> Result<Trial> {
    let group = Group { tokens_per_block: 1, rank_bytes: vec![bytes], ..Group::default() };
    Trial::open(connect(directory, DEADLINE).await?, "doctor", group).await
}

/// Of a size that the pool has memory for, so that no other size gives any up; if the pool has none yet, or only blocks
/// that no message carries, a small one.
fn block_bytes(classes: &[ClassInfo]) -> u64 {
    const SMALL: u64 = 64 << 10;
    const MOST: u64 = 8 << 20;
    let held = classes.iter().filter(|class| class.slots > 0 && class.slot_bytes <= MOST);
    held.map(|class| class.slot_bytes).min().unwrap_or(SMALL)
}

/// False if there was no room.
async fn put_and_get(trial: &Trial, bytes: u64) -> Result<bool> {
    let Trial { session, namespace, .. } = *trial;
    let mut rpc = trial.rpc.clone();
    let hash = b"self-test".to_vec();
    let data: Vec<u8> = (0..bytes / 8).flat_map(u64::to_le_bytes).collect();
    let blocks = vec![Block { hash: hash.clone(), data: data.clone() }];
    let request = PutRequest { session, namespace, blocks, ..PutRequest::default() };
    let stored = rpc.put(request).await.map_err(from_status)?.into_inner();
    match stored.outcomes().next() {
        Some(CommitOutcome::CommitStored) => {}
        Some(CommitOutcome::CommitLost) => return Ok(false),
        outcome => {
            return Err(Error::new(ErrorKind::Io, "the block was not stored").with("outcome", format!("{outcome:?}")));
        }
    }
    let (hash_bytes, hashes) = (hash.len() as u32, hash);
    let request = GetRequest { session, namespace, group: 0, hash_bytes, hashes, lent: None };
    let read = rpc.get(request).await.map_err(from_status)?.into_inner().blocks.pop();
    match read {
        Some(block) if block.data == data => Ok(true),
        Some(_) => Err(Error::new(ErrorKind::Corrupt, "the block was returned with other bytes")
            .hint("stop the daemon, and report this bug with the daemon's log")),
        None => Err(Error::new(ErrorKind::NotFound, "the block was stored, but not found afterwards")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::Verdict;

    #[test]
    fn a_limit_that_was_reached_is_told_by_its_key() {
        let user = |refused: &[(&str, u64)]| UserInfo {
            uid: 1000,
            refused: refused.iter().map(|(limit, count)| (limit.to_string(), *count)).collect(),
            ..UserInfo::default()
        };
        assert_eq!(limits(&[user(&[])]).verdict, Verdict::Ok);
        let check = limits(&[user(&[]), user(&[("engines", 3), ("calls_per_user", 1)])]);
        let told = "user 1000 reached `limits.calls_per_user` 1 times, `limits.engines` 3 times";
        assert_eq!((check.verdict, check.finding.as_str()), (Verdict::Warn, told));
    }

    #[test]
    fn a_daemon_that_waits_long_for_a_core_is_told_with_what_helps() {
        assert_eq!(cores(Duration::ZERO, 0, 0.0).verdict, Verdict::Ok);
        let told = "the daemon waits 0.05 ms on average until it gets a core";
        assert_eq!(cores(Duration::from_millis(50), 1000, 0.0), Check::ok("cores", told));
        let starved = cores(Duration::from_secs(33), 10_000, 0.0);
        assert!(starved.verdict == Verdict::Warn && starved.finding.starts_with("the daemon waits 3.30 ms"));
        assert!(starved.hint.unwrap().contains("`CPUWeight=1000`"));
    }

    #[test]
    fn a_daemon_under_a_limit_of_cores_is_told_of_the_limit_and_not_of_others() {
        let limited = cores(Duration::from_secs(33), 10_000, 0.5);
        let told = "the daemon waits 3.30 ms on average until it gets a core; its control group limits it to 0.5 cores";
        assert_eq!((limited.verdict, limited.finding.as_str()), (Verdict::Warn, told));
        assert!(limited.hint.unwrap().contains("`cpu.max`"));
        let well = cores(Duration::from_millis(50), 1000, 2.0);
        assert!(well.verdict == Verdict::Ok && well.finding.ends_with("limits it to 2 cores"), "{well:?}");
    }

    #[test]
    fn where_no_engine_has_come_the_hint_says_what_vllm_needs() {
        let half = SessionInfo { ranks: 2, attached_ranks: 1, ..SessionInfo::default() };
        for none in [&[][..], &[SessionInfo::default(), half.clone()]] {
            let check = engines(none);
            assert_eq!((check.verdict, &*check.finding), (Verdict::Warn, "no engine has mapped the pool"));
            assert!(check.hint.unwrap().contains(r#"`"kv_load_failure_policy":"recompute"`"#));
        }
        let whole = SessionInfo { attached_ranks: 2, ..half };
        assert_eq!(engines(&[whole.clone(), whole]), Check::ok("engines", "2 engines have mapped the pool"));
    }

    #[test]
    fn an_engine_on_a_gpu_that_has_not_registered_the_whole_pool_is_named() {
        let engine = |engine_id: &str, registered_bytes| SessionInfo {
            engine_id: engine_id.to_string(),
            registered_bytes,
            ..SessionInfo::default()
        };
        let (on_cpu, whole, half) =
            (engine("cpu", None), engine("whole", Some(2 << 30)), engine("half", Some(1 << 30)));
        assert_eq!(registered(std::slice::from_ref(&on_cpu), 2 << 30), None);
        let all = registered(&[on_cpu.clone(), whole.clone()], 2 << 30).unwrap();
        assert_eq!(all, Check::ok("registered", "1 engine has registered the whole pool with its GPU's driver"));
        let check = registered(&[on_cpu, whole, half], 2 << 30).unwrap();
        assert!(check.verdict == Verdict::Warn && check.finding.ends_with("driver: `half` 1.0 GiB"), "{check:?}");
        assert!(check.hint.unwrap().contains("staging memory"));
    }

    #[test]
    fn a_user_is_named_if_the_host_knows_it() {
        let passwd = "root:x:0:0:root:/root:/bin/sh\nmia:x:1000:100::/srv/mia:/bin/sh\n";
        assert_eq!(user(passwd, 1000), "1000 (mia)");
        assert_eq!(user(passwd, 100), "100 (not in `/etc/passwd`)");
    }

    #[test]
    fn a_full_pool_is_well_unless_nothing_in_it_can_be_evicted() {
        let class = |pinned| ClassInfo { slot_bytes: 4096, slots: 9, ready: 9, pinned, ..ClassInfo::default() };
        assert_eq!(without_room(&[class(9), class(8)]).verdict, Verdict::Ok);
        assert_eq!(without_room(&[class(9)]).verdict, Verdict::Warn);
        assert_eq!(without_room(&[]).verdict, Verdict::Warn);
    }

    #[test]
    fn the_block_of_the_self_test_has_a_size_that_is_there() {
        let class = |slot_bytes, slots| ClassInfo { slot_bytes, slots, ..ClassInfo::default() };
        assert_eq!(block_bytes(&[]), 64 << 10);
        assert_eq!(block_bytes(&[class(4096, 0), class(32 << 20, 9)]), 64 << 10);
        assert_eq!(block_bytes(&[class(4 << 20, 1), class(2 << 20, 7), class(4096, 0)]), 2 << 20);
    }

    #[test]
    fn each_way_a_socket_can_fail_has_its_own_words() {
        let directory = tempfile::tempdir().unwrap();
        let (stale, file) = (directory.path().join("stale"), directory.path().join("file"));
        drop(std::os::unix::net::UnixListener::bind(&stale).unwrap());
        std::fs::write(&file, "").unwrap();
        let check = |path: &Path| socket(path, knock(path));
        let left = check(&stale);
        assert_eq!(left.verdict, Verdict::Warn);
        assert!(left.finding.contains("left behind"), "{left:?}");
        let in_the_way = check(&file);
        assert_eq!(in_the_way.verdict, Verdict::Fail);
        assert!(in_the_way.finding.contains("not a socket"), "{in_the_way:?}");
        assert_eq!(check(&directory.path().join("nothing")).verdict, Verdict::Warn);
        let denied = socket(&stale, Err(Io::PermissionDenied.into()));
        assert!(denied.verdict == Verdict::Fail && denied.hint.unwrap().contains("socket.allow_uids"));
    }
}
