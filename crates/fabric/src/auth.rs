//! Who may connect: both sides show that they know one secret, and derive the keys of a connection from it.
//!
//! Invariants: neither the secret nor anything that it could be guessed from without a connection crosses the wire in
//! the clear. Each proof is for one pair of nonces, so it cannot be replayed, and for one role, so it cannot be
//! reflected. With encryption, a second proof is for one channel, so it cannot be passed on. Without a secret the
//! proofs show nothing; addresses are then limited to this host.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use forebay_core::{Error, ErrorKind, Result};

use crate::wire::{ANSWER_BYTES, Answer, HELLO_BYTES, Key};

/// Fewer could be tried one after another.
const FEWEST_BYTES: usize = 16;
/// Longer ones are no secrets: the file is another than was meant.
const MOST_BYTES: u64 = 64 << 10;
/// Permissions of a group to write, and of others to read or write.
const OTHERS: u32 = 0o026;

/// What all endpoints share that may connect to each other.
#[derive(Clone)]
pub struct Secret(Key);

impl Secret {
    /// At least 16 bytes, which should be random.
    pub fn new(bytes: &[u8]) -> Result<Secret> {
        if bytes.len() < FEWEST_BYTES {
            let error = Error::invalid("a secret is too short").with("bytes", bytes.len());
            return Err(error.hint("make one: `(umask 077 && openssl rand -hex 32 > FILE)`"));
        }
        Ok(Secret(blake3::derive_key("forebay transfer 2026 secret", bytes)))
    }

    /// The text of the file without one newline at its end. Errors if others than its owner and group can read it, or
    /// others than its owner can change it.
    pub fn read(path: &Path) -> Result<Secret> {
        let named = |error: Error| error.with("file", path.display());
        let cannot = |error: std::io::Error| {
            let hint = "give a file that this user may read, with the secret alone in it";
            named(Error::new(ErrorKind::Io, "cannot read the file of a secret").source(error).hint(hint))
        };
        let file = File::open(path).map_err(cannot)?;
        let facts = file.metadata().map_err(cannot)?;
        let is_ours = [0, rustix::process::geteuid().as_raw()].contains(&facts.uid());
        if !facts.is_file() || facts.mode() & OTHERS != 0 || !is_ours {
            let error = Error::invalid("the file of a secret is open to other users").with("file", path.display());
            return Err(error.hint("it must be a file of root or this user, with mode 0600, 0400 or 0440"));
        }
        let mut bytes = Vec::new();
        file.take(MOST_BYTES + 1).read_to_end(&mut bytes).map_err(cannot)?;
        if bytes.len() as u64 > MOST_BYTES {
            return Err(cannot(std::io::Error::other("it is too long")));
        }
        Secret::new(bytes.strip_suffix(b"\n").unwrap_or(&bytes)).map_err(named)
    }

    /// What a side without a secret uses.
    pub(crate) fn none() -> Secret {
        Secret([0; 32])
    }

    /// What only those have who know the secret and are at the ends of this channel of TLS. With it in the place of
    /// the secret, proofs and keys are of the channel alone; see `tls`.
    pub fn within(&self, channel: &[u8; 32]) -> Secret {
        Secret(*blake3::Hasher::new_keyed(&self.0).update(channel).update(b"channel").finalize().as_bytes())
    }

    /// The answer with the listener's proof, whatever its proof was.
    pub fn answer(&self, hello: &[u8; HELLO_BYTES], answer: Answer) -> Answer {
        let unproven = Answer { proof: [0; 32], ..answer };
        Answer { proof: *self.proof(b"listens", hello, unproven).as_bytes(), ..unproven }
    }

    /// Errors unless the listener knows the secret.
    pub fn check_answer(&self, hello: &[u8; HELLO_BYTES], answer: Answer) -> Result<()> {
        let expected = self.answer(hello, answer).proof;
        // Comparing hashes takes the same time wherever they differ.
        if blake3::Hash::from(expected) == blake3::Hash::from(answer.proof) { Ok(()) } else { Err(other_secret()) }
    }

    /// The connecting side's proof.
    pub fn proof_of_caller(&self, hello: &[u8; HELLO_BYTES], answer: Answer) -> [u8; 32] {
        *self.proof(b"connects", hello, answer).as_bytes()
    }

    /// Errors unless the connecting side knows the secret.
    pub fn check_caller(&self, hello: &[u8; HELLO_BYTES], answer: Answer, proof: [u8; 32]) -> Result<()> {
        let expected = self.proof(b"connects", hello, answer);
        if expected == blake3::Hash::from(proof) { Ok(()) } else { Err(other_secret()) }
    }

    /// Keys of what the connecting side sends, and of what the listener sends.
    pub fn keys(&self, hello: &[u8; HELLO_BYTES], answer: Answer) -> (Key, Key) {
        let key = |role: &[u8]| *self.proof(role, hello, answer).as_bytes();
        (key(b"key of who connects"), key(b"key of who listens"))
    }

    fn proof(&self, role: &[u8], hello: &[u8; HELLO_BYTES], answer: Answer) -> blake3::Hash {
        let answer: [u8; ANSWER_BYTES] = answer.to_wire();
        blake3::Hasher::new_keyed(&self.0).update(hello).update(&answer).update(role).finalize()
    }
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret")
    }
}

fn other_secret() -> Error {
    Error::new(ErrorKind::Invalid, "the peer has another secret, or none")
        .hint("give both sides the same secret file, or neither; without one they talk on this host only")
}

#[cfg(test)]
mod tests {
    use std::fs::{Permissions, set_permissions, write};
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::wire::Hello;

    #[test]
    fn proofs_count_for_one_secret_one_role_and_one_pair_of_nonces() {
        let (ours, other) = (Secret::new(&[1; 16]).unwrap(), Secret::new(&[2; 16]).unwrap());
        let (is_encrypted, nonce) = (false, [3; 32]);
        let hello = Hello { session: [1; 16], epoch: 2, index: 0, connections: 1, is_encrypted, is_ucx: false, nonce };
        let (encrypted, hello) = (Hello { is_encrypted: true, ..hello }.to_wire(), hello.to_wire());
        let unproven = Answer { epoch: 4, is_encrypted, nonce: [5; 32], proof: [0; 32] };
        let answer = ours.answer(&hello, unproven);
        ours.check_answer(&hello, answer).unwrap();
        assert!(other.check_answer(&hello, answer).is_err());
        assert!(Secret::none().check_answer(&hello, answer).is_err());
        assert!(ours.check_answer(&hello, Answer { epoch: 5, ..answer }).is_err());
        let proof = ours.proof_of_caller(&hello, answer);
        ours.check_caller(&hello, answer, proof).unwrap();
        assert!(other.check_caller(&hello, answer, proof).is_err());
        let later = ours.answer(&hello, Answer { nonce: [6; 32], ..unproven });
        assert!(ours.check_caller(&hello, later, proof).is_err(), "a replay");
        assert!(ours.check_caller(&hello, answer, answer.proof).is_err(), "a reflection");
        let (sent, received) = ours.keys(&hello, answer);
        assert!(sent != received && sent != ours.keys(&hello, later).0);

        // Whether TLS follows is covered, and so is its channel.
        assert!(ours.check_answer(&encrypted, answer).is_err());
        assert!(ours.check_answer(&hello, Answer { is_encrypted: true, ..answer }).is_err());
        let [here, there] = [1, 2].map(|channel| ours.within(&[channel; 32]));
        here.check_answer(&hello, here.answer(&hello, answer)).unwrap();
        assert!(here.check_answer(&hello, answer).is_err(), "a proof without a channel");
        assert!(there.check_answer(&hello, here.answer(&hello, answer)).is_err(), "a proof of another channel");
        assert!(other.within(&[1; 32]).check_answer(&hello, here.answer(&hello, answer)).is_err());
        assert!(there.check_caller(&hello, answer, here.proof_of_caller(&hello, answer)).is_err());
        assert!(here.keys(&hello, answer).0 != there.keys(&hello, answer).0);
    }

    #[test]
    fn a_secret_is_a_file_of_its_owner_alone() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("secret");
        write(&path, "0123456789abcdef\n").unwrap();
        for (mode, is_right) in [(0o600, true), (0o400, true), (0o440, true), (0o604, false), (0o620, false)] {
            set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            assert_eq!(Secret::read(&path).is_ok(), is_right, "{mode:o}");
        }
        set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        write(&path, "0123456789abcde\n").unwrap();
        let error = Secret::read(&path).unwrap_err();
        assert!(error.to_string().contains("too short") && error.hint_text().is_some(), "{error}");
        assert!(!error.told().contains("0123"), "{error}");
        assert!(Secret::read(&home.path().join("absent")).is_err());
    }
}
