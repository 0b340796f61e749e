//! A mount that does harm on command: [`Passthrough`] in a process of its own, over a directory of the test's.
//!
//! The server is this test's own binary; what it is told comes on its input, a line for each command, and each is
//! answered before the next. Frozen by SIGSTOP it answers nobody at all, as a dead server; killed, all who wait fail.
//! Invariant: no server outlives its [`Mount`] or the test that made it, and no mount the next one that is made.

#![allow(dead_code, reason = "each test binary uses its own part")]

pub mod hanging;
mod passthrough;

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use passthrough::{Harm, Op, Passthrough};
use rustix::mount::{UnmountFlags, unmount};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

const TOLD: &str = "FOREBAY_TEST_MOUNT";
/// Of a mount, before the id of the process that serves it.
const NAME: &str = "forebay-test-";
/// What the server says begins so; the test harness says other things.
const SAID: &str = "mount: ";

/// See the module's head.
pub struct Mount {
    child: Child,
    input: ChildStdin,
    output: std::io::Lines<BufReader<ChildStdout>>,
    path: PathBuf,
    home: tempfile::TempDir,
}

impl Mount {
    /// Errors with why there can be none, on machines without FUSE.
    pub fn start(home: tempfile::TempDir) -> Result<Mount, String> {
        remove_leftovers();
        let (path, backing) = (home.path().join("mount"), home.path().join("backing"));
        [&path, &backing].iter().for_each(|folder| std::fs::create_dir(folder).unwrap());
        let body = module_path!().split_once("::").expect("a module of a test").1;
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([&format!("{body}::serves_until_its_test_ends"), "--exact", "--nocapture"])
            .env(TOLD, home.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (input, output) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()).lines());
        let mut mount = Mount { child, input, output, path, home };
        match mount.answer().as_str() {
            "mounted" => Ok(mount),
            why => Err(why.to_owned()),
        }
    }

    /// Where it is mounted.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The directory that it shows, which never hangs.
    pub fn backing(&self) -> PathBuf {
        self.home.path().join("backing")
    }

    /// From now on operations named in `ops`, with commas between them or `all`, come to this harm: `hang`, `cut`,
    /// `flip`, `flip once` (in a block), `flip elsewhere`, `fail <errno>` or `slow <ms>`.
    pub fn harm(&mut self, ops: &str, harm: &str) {
        assert_eq!(self.ask(&format!("{ops} {harm}")), "done");
    }

    /// Ends all harm; what was withheld is done and answered.
    pub fn calm(&mut self) {
        assert_eq!(self.ask("calm"), "done");
    }

    /// Requests that are not answered.
    pub fn withheld(&mut self) -> usize {
        self.ask("withheld").parse().unwrap()
    }

    /// Its server stands still: whatever is asked is not even read.
    pub fn freeze(&self) {
        self.signal(Signal::STOP);
        // It goes on until the last of its threads has noticed.
        waitpid(Some(Pid::from_child(&self.child)), WaitOptions::UNTRACED).unwrap();
    }

    pub fn thaw(&self) {
        self.signal(Signal::CONT);
    }

    /// Kills its server and takes the mount away, as when its host goes down: all who wait for it fail.
    pub fn end(&mut self) {
        let _ = self.child.kill().and_then(|()| self.child.wait());
        if unmount(&self.path, UnmountFlags::DETACH).is_err() {
            // A user mounts by way of a helper, and unmounts so.
            let _ = Command::new("fusermount3").args(["-u", "-z", "-q"]).arg(&self.path).status();
        }
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    fn ask(&mut self, command: &str) -> String {
        self.input.write_all(format!("{command}\n").as_bytes()).unwrap();
        self.answer()
    }

    fn answer(&mut self) -> String {
        let said =
            self.output.by_ref().map_while(Result::ok).find_map(|line| Some(line.split_once(SAID)?.1.to_owned()));
        said.unwrap_or_else(|| panic!("the server of {} ended by itself", self.path.display()))
    }
}

/// Mounts whose test was killed before it could take them away.
fn remove_leftovers() {
    for line in std::fs::read_to_string("/proc/self/mounts").unwrap().lines() {
        let [name, path, ..] = line.split(' ').collect::<Vec<_>>()[..] else { continue };
        if name.strip_prefix(NAME).is_some_and(|pid| !Path::new("/proc").join(pid).exists()) {
            let _ = unmount(path, UnmountFlags::DETACH);
        }
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        self.end();
    }
}

#[test]
fn serves_until_its_test_ends() {
    let Ok(home) = std::env::var(TOLD) else { return };
    // Whoever started it may be killed while its threads wait for this mount: they can end when this has ended.
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL)).unwrap();
    rustix::process::umask(rustix::fs::Mode::empty());
    let (mount, backing) = (Path::new(&home).join("mount"), Path::new(&home).join("backing"));
    let filesystem = Passthrough::new(&backing).unwrap();
    let mut config = fuser::Config::default();
    config.mount_options = vec![
        fuser::MountOption::FSName(format!("{NAME}{}", std::process::id())),
        fuser::MountOption::DefaultPermissions,
    ];
    // Only root may let others in without being asked.
    config.acl = if rustix::process::geteuid().is_root() { fuser::SessionACL::All } else { fuser::SessionACL::Owner };
    let session = match fuser::spawn_mount(filesystem.clone(), &mount, &config) {
        Ok(session) => session,
        Err(error) => return say(&error.to_string()),
    };
    say("mounted");
    for line in std::io::stdin().lines() {
        say(&obey(&filesystem, &line.unwrap()));
    }
    drop(session);
}

fn obey(filesystem: &Passthrough, command: &str) -> String {
    let words: Vec<&str> = command.split(' ').collect();
    let (ops, harm) = match words[..] {
        ["calm"] => {
            filesystem.calm();
            return "done".to_owned();
        }
        ["withheld"] => return filesystem.withheld().to_string(),
        [ops, "hang"] => (ops, Harm::Hang),
        [ops, "cut"] => (ops, Harm::Cut),
        [ops, "flip"] => (ops, Harm::Flip),
        [ops, "flip", "once"] => (ops, Harm::FlipOnce),
        [ops, "flip", "elsewhere"] => (ops, Harm::FlipElsewhere),
        [ops, "fail", errno] => (ops, Harm::Fail(errno.parse().unwrap())),
        [ops, "slow", ms] => (ops, Harm::Slow(Duration::from_millis(ms.parse().unwrap()))),
        _ => panic!("{command}?"),
    };
    let named = |name: &str| ops == "all" || ops.split(',').any(|op| op == name);
    filesystem.harm(Op::ALL.into_iter().filter(|(_, name)| named(name)).map(|(op, _)| op), harm);
    "done".to_owned()
}

fn say(what: &str) {
    let mut out = std::io::stdout().lock();
    out.write_all(format!("{SAID}{what}\n").as_bytes()).and_then(|()| out.flush()).expect("the test listens");
}
