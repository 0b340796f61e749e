//! Messages with descriptors over a Unix socket.
//!
//! A message is four bytes of length, that many bytes, and the descriptors beside its first byte. Invariants: a
//! message has at most `MAX_MESSAGE_BYTES` and `MAX_FDS`. Every call ends by its deadline. Received descriptors close
//! on exec, and on error nothing received stays open. The sockets' blocking mode does not matter and is not changed.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use forebay_core::{Error, ErrorKind, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};

/// An attach request or answer is a few hundred bytes.
pub const MAX_MESSAGE_BYTES: usize = 64 << 10;
/// An attach answer carries three.
pub const MAX_FDS: usize = 8;

/// Sends one message.
pub fn send_fds(stream: &UnixStream, bytes: &[u8], fds: &[BorrowedFd<'_>], deadline: Instant) -> Result<()> {
    if bytes.len() > MAX_MESSAGE_BYTES || fds.len() > MAX_FDS {
        return Err(Error::invalid("a message is too large").with("bytes", bytes.len()).with("fds", fds.len()));
    }
    let mut message = (bytes.len() as u32).to_le_bytes().to_vec();
    message.extend_from_slice(bytes);
    let (mut rest, mut fds) = (&message[..], fds);
    while !rest.is_empty() {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            let has_room = control.push(SendAncillaryMessage::ScmRights(fds));
            assert!(has_room, "the buffer holds {MAX_FDS} descriptors");
        }
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        match sendmsg(stream, &[IoSlice::new(rest)], &mut control, flags) {
            // The descriptors were sent with the first byte.
            Ok(sent) => (rest, fds) = (&rest[sent..], &[]),
            Err(Errno::AGAIN) => wait(stream, PollFlags::OUT, deadline)?,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(broken(errno)),
        }
    }
    Ok(())
}

/// Receives one message.
pub fn recv_fds(stream: &UnixStream, deadline: Instant) -> Result<(Vec<u8>, Vec<OwnedFd>)> {
    let mut fds = Vec::new();
    let mut head = [0; 4];
    fill(stream, &mut head, &mut fds, deadline)?;
    let len = u32::from_le_bytes(head) as usize;
    if len > MAX_MESSAGE_BYTES {
        return Err(Error::invalid("a message is too large").with("bytes", len));
    }
    let mut bytes = vec![0; len];
    fill(stream, &mut bytes, &mut fds, deadline)?;
    Ok((bytes, fds))
}

fn fill(stream: &UnixStream, bytes: &mut [u8], fds: &mut Vec<OwnedFd>, deadline: Instant) -> Result<()> {
    let mut filled = 0;
    while filled < bytes.len() {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut target = [IoSliceMut::new(&mut bytes[filled..])];
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        match recvmsg(stream, &mut target, &mut control, flags) {
            Ok(received) => {
                let messages = control.drain();
                fds.extend(
                    messages
                        .filter_map(|m| if let RecvAncillaryMessage::ScmRights(fds) = m { Some(fds) } else { None })
                        .flatten(),
                );
                if received.flags.contains(ReturnFlags::CTRUNC) || fds.len() > MAX_FDS {
                    return Err(Error::invalid("a message carries too many descriptors").with("limit", MAX_FDS));
                }
                if received.bytes == 0 {
                    return Err(Error::new(ErrorKind::Unavailable, "the other side closed the socket"));
                }
                filled += received.bytes;
            }
            Err(Errno::AGAIN) => wait(stream, PollFlags::IN, deadline)?,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(broken(errno)),
        }
    }
    Ok(())
}

/// Waits until the socket is ready, or errors with `Timeout` at the deadline.
fn wait(stream: &UnixStream, event: PollFlags, deadline: Instant) -> Result<()> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left == Duration::ZERO {
            return Err(Error::new(ErrorKind::Timeout, "the other side of the socket did not answer in time"));
        }
        let timeout = Timespec { tv_sec: left.as_secs() as _, tv_nsec: left.subsec_nanos() as _ };
        let stream = stream.as_fd();
        match poll(&mut [PollFd::new(&stream, event)], Some(&timeout)) {
            Ok(0) | Err(Errno::INTR) => {}
            Ok(_) => return Ok(()),
            Err(errno) => return Err(broken(errno)),
        }
    }
}

fn broken(errno: Errno) -> Error {
    let kind = match errno {
        Errno::PIPE | Errno::CONNRESET => ErrorKind::Unavailable,
        _ => ErrorKind::Io,
    };
    Error::new(kind, "the connection over the socket failed").source(std::io::Error::from(errno))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::{Read, Seek, Write};
    use std::thread;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(20)
    }

    fn file_with(text: &str) -> File {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        file.rewind().unwrap();
        file
    }

    #[test]
    fn messages_arrive_one_by_one_with_their_own_descriptors() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (one, two) = (file_with("one"), file_with("two"));
        send_fds(&ours, b"first", &[one.as_fd(), two.as_fd()], soon()).unwrap();
        send_fds(&ours, b"", &[], soon()).unwrap();
        send_fds(&ours, b"third", &[two.as_fd()], soon()).unwrap();
        let (bytes, fds) = recv_fds(&theirs, soon()).unwrap();
        assert_eq!((&bytes[..], fds.len()), (&b"first"[..], 2));
        let mut text = String::new();
        File::from(fds.into_iter().next().unwrap()).read_to_string(&mut text).unwrap();
        assert_eq!(text, "one");
        assert_eq!(recv_fds(&theirs, soon()).unwrap().0, b"");
        let (bytes, fds) = recv_fds(&theirs, soon()).unwrap();
        assert_eq!((&bytes[..], fds.len()), (&b"third"[..], 1));
    }

    #[test]
    fn a_message_larger_than_the_socket_arrives_whole() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        rustix::net::sockopt::set_socket_send_buffer_size(&ours, 4096).unwrap();
        let long = vec![7; MAX_MESSAGE_BYTES];
        let (copy, file) = (long.clone(), file_with("x"));
        let sender = thread::spawn(move || send_fds(&ours, &copy, &[file.as_fd()], soon()));
        let (bytes, fds) = recv_fds(&theirs, soon()).unwrap();
        assert!(bytes == long && fds.len() == 1);
        sender.join().unwrap().unwrap();
    }

    #[test]
    fn a_silent_or_gone_or_excessive_other_side_is_an_error() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let nearly_now = || Instant::now() + Duration::from_millis(10);
        assert_eq!(recv_fds(&theirs, nearly_now()).unwrap_err().kind(), ErrorKind::Timeout);
        let full = (0..1000).find_map(|_| send_fds(&ours, &[0; 4096], &[], nearly_now()).err());
        assert_eq!(full.expect("the socket takes no end of bytes").kind(), ErrorKind::Timeout);
        let file = file_with("x");
        assert_eq!(send_fds(&ours, b"", &[file.as_fd(); 9], soon()).unwrap_err().kind(), ErrorKind::Invalid);

        let (mut ours, theirs) = UnixStream::pair().unwrap();
        ours.write_all(&u32::MAX.to_le_bytes()).unwrap();
        assert_eq!(recv_fds(&theirs, soon()).unwrap_err().kind(), ErrorKind::Invalid);

        let (mut ours, theirs) = UnixStream::pair().unwrap();
        ours.write_all(&[9, 0, 0, 0, 1]).unwrap();
        drop(ours);
        assert_eq!(recv_fds(&theirs, soon()).unwrap_err().kind(), ErrorKind::Unavailable);
        assert_eq!(send_fds(&theirs, b"x", &[], soon()).unwrap_err().kind(), ErrorKind::Unavailable);
    }

    #[test]
    fn more_descriptors_than_allowed_are_refused_and_closed() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let file = file_with("x");
        let (reader, writer) = std::io::pipe().unwrap();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(12))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let mut many = vec![file.as_fd(); 11];
        many.insert(0, writer.as_fd());
        assert!(control.push(SendAncillaryMessage::ScmRights(&many)));
        sendmsg(&ours, &[IoSlice::new(&[0; 4])], &mut control, SendFlags::empty()).unwrap();
        assert_eq!(recv_fds(&theirs, soon()).unwrap_err().kind(), ErrorKind::Invalid);
        drop(writer);
        assert_eq!(rustix::io::read(&reader, &mut [0; 1]), Ok(0), "a refused descriptor is still open");
    }
}
