//! Whether a daemon answers at the socket, speaks our protocol, and gives back what was stored.

use std::io::ErrorKind as Io;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use forebay_core::namespace::Descriptor;
use forebay_core::{Error, ErrorKind, Result};
use forebay_io::trust::{self, Holds};
use forebay_rpc::client::{Client, GroupBytes, connect, lone_session};
use forebay_rpc::proto::{Block, CommitOutcome, PurgeRequest, SessionInfo, TierInfo};
use forebay_rpc::{Hashes, PROTOCOL_VERSION, RPC_SOCKET, from_status};

use super::Check;
use crate::client;
use crate::output::size;

/// What a running daemon says of its pool.
pub struct Holdings {
    pub capacity_bytes: u64,
    pub populated_bytes: u64,
    pub huge_bytes: u64,
}

/// Everything found at the socket.
pub struct Findings {
    pub checks: Vec<Check>,
    /// None without a daemon.
    pub holdings: Option<Holdings>,
    /// None without a daemon.
    pub tiers: Option<Vec<TierInfo>>,
}

/// Asks the daemon whose sockets lie in `directory`, if there is one.
pub async fn examine(directory: &Path) -> Findings {
    let path = directory.join(RPC_SOCKET);
    let check = match forebay_rpc::client::socket(directory, RPC_SOCKET) {
        Err(error) if error.kind() == ErrorKind::Invalid => Check::failed("socket", &error),
        Ok(_) | Err(_) => socket(&path, UnixStream::connect(&path).map(drop)),
    };
    // Without a daemon: whether one could be started here.
    let check = match trust::check_directory(directory, Holds::Sockets) {
        Err(error) if check.verdict == super::Verdict::Warn => Check::failed("socket", &error),
        _ => check,
    };
    if check.verdict != super::Verdict::Ok {
        return Findings { checks: vec![check], holdings: None, tiers: None };
    }
    let mut client = client::connect(directory);
    let reply = match client.inspect().await {
        Ok(reply) => reply,
        Err(error) => {
            let checks = vec![check, Check::failed("daemon", &error)];
            return Findings { checks, holdings: None, tiers: None };
        }
    };
    let holdings = Holdings {
        capacity_bytes: reply.capacity_bytes,
        populated_bytes: reply.populated_bytes,
        huge_bytes: reply.huge_bytes,
    };
    let engines = engines(&reply.sessions);
    let checks = vec![check, versions(session(directory).await), self_test(&mut client).await, engines];
    Findings { checks, holdings: Some(holdings), tiers: Some(reply.tiers) }
}

/// `connected` is what came of an attempt to connect to `path`.
fn socket(path: &Path, connected: std::io::Result<()>) -> Check {
    let shown = path.display();
    let start = "start a daemon with `forebay serve`; doctor then checks its replies and runs the self-test";
    match connected {
        Ok(()) => Check::ok("socket", format!("a daemon listens at `{shown}`")),
        Err(error) if error.kind() == Io::NotFound => Check::warn("socket", format!("no daemon at `{shown}`"), start),
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

fn is_socket(path: &Path) -> bool {
    path.metadata().is_ok_and(|metadata| metadata.file_type().is_socket())
}

fn versions(session: Result<()>) -> Check {
    match session {
        Ok(()) => Check::ok("versions", format!("this program and the daemon speak protocol {PROTOCOL_VERSION}")),
        Err(error) => Check::failed("versions", &error),
    }
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

/// Opens a session, which a daemon of another protocol refuses, and leaves it.
async fn session(directory: &Path) -> Result<()> {
    const DEADLINE: Duration = Duration::from_secs(5);
    let open = async {
        let engine_id = format!("forebay-doctor-{}", std::process::id());
        let mut rpc = connect(directory, DEADLINE).await?;
        let mut events = rpc.open_session(lone_session(engine_id)).await.map_err(from_status)?.into_inner();
        events.message().await.map(drop).map_err(from_status)
    };
    tokio::time::timeout(DEADLINE, open)
        .await
        .unwrap_or_else(|_| Err(Error::new(ErrorKind::Timeout, "the daemon did not open a session within 5 s")))
}

const BLOCK_BYTES: u64 = 64 << 10;

/// Stores a block under a tenant of our own, reads it back, and purges it whatever came of that.
async fn self_test(client: &mut Client) -> Check {
    let fields = [(Descriptor::TENANT, "doctor"), ("purpose", "self-test")];
    let fields = fields.map(|(name, value)| (name.to_string(), value.to_string()));
    let start = Instant::now();
    let outcome = put_and_get(client, fields.clone()).await;
    let elapsed = start.elapsed();
    let purged = purge(client, fields).await;
    match (outcome, purged) {
        (Ok(true), Ok(_)) => {
            let ms = elapsed.as_secs_f64() * 1e3;
            Check::ok("self-test", format!("{} stored, read back and purged in {ms:.1} ms", size(BLOCK_BYTES)))
        }
        (Ok(false), Ok(_)) => Check::warn(
            "self-test",
            "the pool has no space for one block",
            "`forebay inspect` shows what is pinned; raise `pool.capacity_bytes`",
        ),
        (Err(error), _) | (_, Err(error)) => Check::failed("self-test", &error),
    }
}

/// False if there was no room.
async fn put_and_get(client: &mut Client, fields: [(String, String); 2]) -> Result<bool> {
    let namespace = client.open_namespace(fields, [GroupBytes { group: 0, bytes: BLOCK_BYTES }]).await?;
    // Another hash and other bytes each time: what an earlier run left behind cannot pass for this one's.
    let nonce = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |age| age.as_nanos() as u64);
    let hash = nonce.to_le_bytes().to_vec();
    let data: Vec<u8> = (0..BLOCK_BYTES / 8).flat_map(|word| (word ^ nonce).to_le_bytes()).collect();
    let block = Block { hash: hash.clone(), data: data.clone() };
    match client.put(namespace, 0, &[], vec![block]).await?.first() {
        Some(CommitOutcome::CommitStored) => {}
        Some(CommitOutcome::CommitLost) => return Ok(false),
        outcome => {
            return Err(Error::new(ErrorKind::Io, "the block was not stored").with("outcome", format!("{outcome:?}")));
        }
    }
    let mut hashes = Hashes::default();
    hashes.push(&hash)?;
    match client.get(namespace, 0, &hashes).await?.pop().flatten() {
        Some(read) if read == data => Ok(true),
        Some(_) => Err(Error::new(ErrorKind::Corrupt, "the block was returned with other bytes")
            .hint("stop the daemon, and report this bug with the daemon's log")),
        None => Err(Error::new(ErrorKind::NotFound, "the block was stored, but not found afterwards")),
    }
}

async fn purge(client: &mut Client, fields: [(String, String); 2]) -> Result<()> {
    let id = Descriptor::new(fields)?.id();
    let request = PurgeRequest { namespace_id: id.0.to_be_bytes().to_vec(), ..PurgeRequest::default() };
    client.purge(request).await.map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::Verdict;

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
    fn each_way_a_socket_can_fail_has_its_own_words() {
        let directory = tempfile::tempdir().unwrap();
        let (stale, file) = (directory.path().join("stale"), directory.path().join("file"));
        drop(std::os::unix::net::UnixListener::bind(&stale).unwrap());
        std::fs::write(&file, "").unwrap();
        let check = |path: &Path| socket(path, UnixStream::connect(path).map(drop));
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
