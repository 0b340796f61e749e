//! A filesystem in user space that shows a directory as it is, until it is told to do harm: to answer nothing, late,
//! with an error, or with less than was asked for.
//!
//! Invariants: what it is not told to harm is passed on as it is; a request that it withholds keeps the kernel's
//! waiter waiting and nobody else, and is done and answered when the harm ends, whoever still waits for it.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{DirEntryExt, FileExt};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use fuser::*;
use rustix::fs::{AtFlags, CWD, Mode, OFlags, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT};

/// Nothing is remembered by the kernel: each look is a request.
const NEVER: Duration = Duration::ZERO;

/// Requests by what they do.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Op {
    Look,
    Open,
    Read,
    Write,
    Sync,
    Make,
    Link,
    Remove,
    Change,
    List,
}

impl Op {
    pub const ALL: [(Op, &str); 10] = [
        (Op::Look, "look"),
        (Op::Open, "open"),
        (Op::Read, "read"),
        (Op::Write, "write"),
        (Op::Sync, "sync"),
        (Op::Make, "make"),
        (Op::Link, "link"),
        (Op::Remove, "remove"),
        (Op::Change, "change"),
        (Op::List, "list"),
    ];
}

#[derive(Clone, Copy, Debug)]
pub enum Harm {
    Hang,
    Slow(Duration),
    Fail(i32),
    /// Reads end early, and writes are said to be whole when half of them was kept.
    Cut,
    /// Reads have a bit that was not written.
    Flip,
    /// The next read does, and no other.
    FlipOnce,
    /// Each read does, and each another one.
    FlipElsewhere,
}

type Withheld = Box<dyn FnOnce(&Tree) + Send>;

#[derive(Default)]
struct Harms {
    of: HashMap<Op, Harm>,
    withheld: Vec<Withheld>,
}

/// See the module's head.
#[derive(Clone)]
pub struct Passthrough {
    tree: Arc<Tree>,
    harms: Arc<Mutex<Harms>>,
}

/// What the kernel knows of.
struct Tree {
    nodes: Mutex<HashMap<u64, Node>>,
    files: Mutex<HashMap<u64, Arc<File>>>,
    next_file: AtomicU64,
    flips: AtomicU64,
}

struct Node {
    fd: Arc<OwnedFd>,
    lookups: u64,
}

impl Passthrough {
    pub fn new(backing: &std::path::Path) -> rustix::io::Result<Passthrough> {
        let fd = rustix::fs::open(backing, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        let root = Node { fd: Arc::new(fd), lookups: u64::MAX };
        let nodes = Mutex::new(HashMap::from([(INodeNo::ROOT.0, root)]));
        let tree =
            Arc::new(Tree { nodes, files: Mutex::default(), next_file: AtomicU64::new(1), flips: AtomicU64::new(0) });
        Ok(Passthrough { tree, harms: Arc::default() })
    }

    pub fn harm(&self, ops: impl IntoIterator<Item = Op>, harm: Harm) {
        self.harms.lock().unwrap().of.extend(ops.into_iter().map(|op| (op, harm)));
    }

    /// Does no harm from now on, and what was withheld.
    pub fn calm(&self) {
        let mut harms = self.harms.lock().unwrap();
        harms.of.clear();
        let withheld = std::mem::take(&mut harms.withheld);
        drop(harms);
        withheld.into_iter().for_each(|answer| answer(&self.tree));
    }

    pub fn withheld(&self) -> usize {
        self.harms.lock().unwrap().withheld.len()
    }

    /// Does `work`, as harm allows it.
    fn act<R: Reply>(
        &self,
        op: Op,
        reply: R,
        work: impl FnOnce(&Tree) -> rustix::io::Result<R::Answer> + Send + 'static,
    ) {
        let mut harms = self.harms.lock().unwrap();
        let harm = harms.of.get(&op).copied();
        let answer = move |tree: &Tree| match harm {
            Some(Harm::Fail(errno)) => reply.refuse(Errno::from_i32(errno)),
            _ => match work(tree) {
                Ok(answer) => reply.answer(answer),
                Err(error) => reply.refuse(Errno::from_i32(error.raw_os_error())),
            },
        };
        match harm {
            Some(Harm::Hang) => harms.withheld.push(Box::new(answer)),
            Some(Harm::Slow(by)) => {
                let tree = self.tree.clone();
                drop(harms);
                std::thread::spawn(move || {
                    std::thread::sleep(by);
                    answer(&tree);
                });
            }
            _ => {
                drop(harms);
                answer(&self.tree);
            }
        }
    }

    /// What this request comes to; harm that is done once is over then, and comes to requests of which `may_be_once`
    /// says so.
    fn harm_of(&self, op: Op, may_be_once: bool) -> Option<Harm> {
        let of = &mut self.harms.lock().unwrap().of;
        match of.get(&op).copied() {
            Some(Harm::FlipOnce) if may_be_once => of.remove(&op),
            Some(Harm::FlipOnce) => None,
            harm => harm,
        }
    }
}

impl Tree {
    fn fd(&self, node: INodeNo) -> rustix::io::Result<Arc<OwnedFd>> {
        self.nodes.lock().unwrap().get(&node.0).map(|node| node.fd.clone()).ok_or(rustix::io::Errno::STALE)
    }

    /// A path that leads to the node itself, whatever its names are by now.
    fn path(&self, node: INodeNo) -> rustix::io::Result<String> {
        Ok(format!("/proc/self/fd/{}", self.fd(node)?.as_raw_fd()))
    }

    fn file(&self, handle: FileHandle) -> rustix::io::Result<Arc<File>> {
        self.files.lock().unwrap().get(&handle.0).cloned().ok_or(rustix::io::Errno::BADF)
    }

    fn opened(&self, file: File) -> FileHandle {
        let handle = self.next_file.fetch_add(1, Relaxed);
        self.files.lock().unwrap().insert(handle, Arc::new(file));
        FileHandle(handle)
    }

    fn look(&self, parent: INodeNo, name: &OsStr) -> rustix::io::Result<FileAttr> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = rustix::fs::openat(self.fd(parent)?, name, flags, Mode::empty())?;
        let about = attributes(&fd)?;
        let mut nodes = self.nodes.lock().unwrap();
        nodes.entry(about.ino.0).or_insert_with(|| Node { fd: Arc::new(fd), lookups: 0 }).lookups += 1;
        Ok(about)
    }

    fn about(&self, node: INodeNo) -> rustix::io::Result<FileAttr> {
        Ok(FileAttr { ino: node, ..attributes(&self.fd(node)?)? })
    }

    fn change(&self, node: INodeNo, wanted: Wanted) -> rustix::io::Result<FileAttr> {
        let path = self.path(node)?;
        if let Some(bytes) = wanted.size {
            rustix::fs::ftruncate(rustix::fs::open(&path, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?, bytes)?;
        }
        if let Some(mode) = wanted.mode {
            rustix::fs::chmod(&path, Mode::from_raw_mode(mode))?;
        }
        if wanted.owner != (None, None) {
            let (user, group) = wanted.owner;
            rustix::fs::chown(&path, user.map(rustix::fs::Uid::from_raw), group.map(rustix::fs::Gid::from_raw))?;
        }
        let times = Timestamps { last_access: time(wanted.times.0), last_modification: time(wanted.times.1) };
        rustix::fs::utimensat(CWD, &path, &times, AtFlags::empty())?;
        self.about(node)
    }

    fn list(&self, node: INodeNo) -> rustix::io::Result<Vec<Entry>> {
        let entries = std::fs::read_dir(self.path(node)?).map_err(raw)?;
        let entry = |(number, entry): (u64, std::io::Result<std::fs::DirEntry>)| {
            let entry = entry.map_err(raw)?;
            let kind = entry.file_type().ok().and_then(fuser::FileType::from_std).ok_or(rustix::io::Errno::IO)?;
            Ok((number, INodeNo(entry.ino()), kind, entry.file_name()))
        };
        (1..).zip(entries).map(entry).collect()
    }
}

/// Of a folder: its place in the list, what it is, and its name.
type Entry = (u64, INodeNo, fuser::FileType, OsString);

/// What is to be changed of a file.
#[derive(Default)]
struct Wanted {
    size: Option<u64>,
    mode: Option<u32>,
    owner: (Option<u32>, Option<u32>),
    times: (Option<TimeOrNow>, Option<TimeOrNow>),
}

impl Filesystem for Passthrough {
    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let name = name.to_owned();
        self.act(Op::Look, reply, move |tree| tree.look(parent, &name));
    }

    fn forget(&self, _: &Request, node: INodeNo, count: u64) {
        let mut nodes = self.tree.nodes.lock().unwrap();
        if let Some(known) = nodes.get_mut(&node.0).filter(|_| node != INodeNo::ROOT) {
            known.lookups = known.lookups.saturating_sub(count);
            if known.lookups == 0 {
                nodes.remove(&node.0);
            }
        }
    }

    fn getattr(&self, _: &Request, node: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        self.act(Op::Look, reply, move |tree| tree.about(node));
    }

    fn setattr(
        &self,
        _: &Request,
        node: INodeNo,
        mode: Option<u32>,
        user: Option<u32>,
        group: Option<u32>,
        size: Option<u64>,
        accessed: Option<TimeOrNow>,
        modified: Option<TimeOrNow>,
        _: Option<SystemTime>,
        _: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let wanted = Wanted { size, mode, owner: (user, group), times: (accessed, modified) };
        self.act(Op::Change, reply, move |tree| tree.change(node, wanted));
    }

    fn mkdir(&self, who: &Request, parent: INodeNo, name: &OsStr, mode: u32, _: u32, reply: ReplyEntry) {
        let (name, owner) = (name.to_owned(), owner(who));
        self.act(Op::Make, reply, move |tree| {
            rustix::fs::mkdirat(tree.fd(parent)?, &name, Mode::from_raw_mode(mode))?;
            let made = tree.look(parent, &name)?;
            tree.change(made.ino, Wanted { owner, ..Wanted::default() })
        });
    }

    fn create(&self, who: &Request, parent: INodeNo, name: &OsStr, mode: u32, _: u32, flags: i32, reply: ReplyCreate) {
        let (name, owner) = (name.to_owned(), owner(who));
        self.act(Op::Make, reply, move |tree| {
            let flags = backing_flags(flags) | OFlags::CREATE;
            let file = rustix::fs::openat(tree.fd(parent)?, &name, flags, Mode::from_raw_mode(mode))?;
            let made = tree.look(parent, &name)?;
            let made = tree.change(made.ino, Wanted { owner, ..Wanted::default() })?;
            Ok((made, tree.opened(file.into())))
        });
    }

    fn unlink(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let name = name.to_owned();
        self.act(Op::Remove, reply, move |tree| rustix::fs::unlinkat(tree.fd(parent)?, &name, AtFlags::empty()));
    }

    fn rmdir(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let name = name.to_owned();
        self.act(Op::Remove, reply, move |tree| rustix::fs::unlinkat(tree.fd(parent)?, &name, AtFlags::REMOVEDIR));
    }

    fn rename(
        &self,
        _: &Request,
        parent: INodeNo,
        name: &OsStr,
        to: INodeNo,
        to_name: &OsStr,
        _: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let (name, to_name) = (name.to_owned(), to_name.to_owned());
        self.act(Op::Link, reply, move |tree| rustix::fs::renameat(tree.fd(parent)?, &name, tree.fd(to)?, &to_name));
    }

    fn link(&self, _: &Request, node: INodeNo, to: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let name = name.to_owned();
        self.act(Op::Link, reply, move |tree| {
            rustix::fs::linkat(CWD, tree.path(node)?, tree.fd(to)?, &name, AtFlags::SYMLINK_FOLLOW)?;
            tree.look(to, &name)
        });
    }

    fn open(&self, _: &Request, node: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        self.act(Op::Open, reply, move |tree| {
            let file = rustix::fs::open(tree.path(node)?, backing_flags(flags.0), Mode::empty())?;
            Ok(tree.opened(file.into()))
        });
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        at: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        // One flip is for a block: the few bytes that hosts count in are read now and then, and would take it away.
        let is_of_block = size > 4096;
        let harm = self.harm_of(Op::Read, is_of_block);
        self.act(Op::Read, reply, move |tree| {
            let mut bytes = vec![0; size as usize];
            let read = tree.file(handle)?.read_at(&mut bytes, at).map_err(raw)?;
            bytes.truncate(if matches!(harm, Some(Harm::Cut)) { read / 2 } else { read });
            let middle = bytes.len() / 2;
            let flipped = match harm {
                Some(Harm::Flip | Harm::FlipOnce) => Some(0),
                Some(Harm::FlipElsewhere) => Some(tree.flips.fetch_add(1, Relaxed) as usize % 64),
                _ => None,
            };
            if let Some(byte) = flipped.and_then(|by| bytes.get_mut(middle + by)) {
                *byte ^= 1;
            }
            Ok(bytes)
        });
    }

    fn write(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        at: u64,
        bytes: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let said = bytes.len();
        let kept = if matches!(self.harm_of(Op::Write, true), Some(Harm::Cut)) { said / 2 } else { said };
        let bytes = bytes[..kept].to_vec();
        self.act(Op::Write, reply, move |tree| {
            tree.file(handle)?.write_all_at(&bytes, at).map_err(raw)?;
            Ok(said as u32)
        });
    }

    fn fsync(&self, _: &Request, _: INodeNo, handle: FileHandle, _: bool, reply: ReplyEmpty) {
        self.act(Op::Sync, reply, move |tree| tree.file(handle)?.sync_data().map_err(raw));
    }

    fn release(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        _: OpenFlags,
        _: Option<LockOwner>,
        _: bool,
        reply: ReplyEmpty,
    ) {
        self.tree.files.lock().unwrap().remove(&handle.0);
        reply.ok();
    }

    fn readdir(&self, _: &Request, node: INodeNo, _: FileHandle, from: u64, reply: ReplyDirectory) {
        self.act(Op::List, reply, move |tree| Ok(tree.list(node)?.into_iter().skip(from as usize).collect()));
    }
}

/// An answer to one kind of request.
trait Reply: Send + 'static {
    type Answer;
    fn answer(self, answer: Self::Answer);
    fn refuse(self, error: Errno);
}

macro_rules! reply {
    ($reply:ty, $answer:ty, |$this:ident, $given:pat_param| $work:expr) => {
        impl Reply for $reply {
            type Answer = $answer;
            #[allow(unused_mut)]
            fn answer(mut $this, $given: $answer) {
                $work
            }
            fn refuse(self, error: Errno) {
                self.error(error);
            }
        }
    };
}

reply!(ReplyEmpty, (), |self, ()| self.ok());
reply!(ReplyAttr, FileAttr, |self, about| self.attr(&NEVER, &about));
reply!(ReplyEntry, FileAttr, |self, about| self.entry(&NEVER, &about, Generation(0)));
reply!(ReplyOpen, FileHandle, |self, handle| self.opened(handle, FopenFlags::empty()));
reply!(ReplyData, Vec<u8>, |self, bytes| self.data(&bytes));
reply!(ReplyWrite, u32, |self, bytes| self.written(bytes));
reply!(ReplyCreate, (FileAttr, FileHandle), |self, (about, handle)| {
    self.created(&NEVER, &about, Generation(0), handle, FopenFlags::empty());
});
reply!(ReplyDirectory, Vec<Entry>, |self, entries| {
    // The kernel asks again for what it had no room for.
    let _ = entries.into_iter().any(|(number, node, kind, name)| self.add(node, number, kind, name));
    self.ok();
});

fn attributes(fd: impl AsFd) -> rustix::io::Result<FileAttr> {
    let about = rustix::fs::fstat(fd)?;
    let time = |seconds: i64, nanos: u64| SystemTime::UNIX_EPOCH + Duration::new(seconds.max(0) as u64, nanos as u32);
    let kind = match rustix::fs::FileType::from_raw_mode(about.st_mode) {
        rustix::fs::FileType::Directory => fuser::FileType::Directory,
        rustix::fs::FileType::Symlink => fuser::FileType::Symlink,
        _ => fuser::FileType::RegularFile,
    };
    Ok(FileAttr {
        ino: INodeNo(about.st_ino),
        size: about.st_size as u64,
        blocks: about.st_blocks as u64,
        atime: time(about.st_atime, about.st_atime_nsec),
        mtime: time(about.st_mtime, about.st_mtime_nsec),
        ctime: time(about.st_ctime, about.st_ctime_nsec),
        crtime: SystemTime::UNIX_EPOCH,
        kind,
        perm: (about.st_mode & 0o7777) as u16,
        nlink: about.st_nlink as u32,
        uid: about.st_uid,
        gid: about.st_gid,
        rdev: 0,
        blksize: about.st_blksize as u32,
        flags: 0,
    })
}

fn owner(who: &Request) -> (Option<u32>, Option<u32>) {
    (Some(who.uid()), Some(who.gid()))
}

/// The file below is opened as the one above, through its page cache in any case.
fn backing_flags(flags: i32) -> OFlags {
    (OFlags::from_bits_retain(flags as u32) - OFlags::DIRECT - OFlags::NOFOLLOW) | OFlags::CLOEXEC
}

fn time(wanted: Option<TimeOrNow>) -> Timespec {
    match wanted {
        None => Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT },
        Some(TimeOrNow::Now) => Timespec { tv_sec: 0, tv_nsec: UTIME_NOW },
        Some(TimeOrNow::SpecificTime(at)) => {
            let since = at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
            Timespec { tv_sec: since.as_secs() as i64, tv_nsec: since.subsec_nanos().into() }
        }
    }
}

fn raw(error: std::io::Error) -> rustix::io::Errno {
    rustix::io::Errno::from_io_error(&error).unwrap_or(rustix::io::Errno::IO)
}
