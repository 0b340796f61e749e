//! The side that serves: it answers questions between the runs, and is otherwise a fabric that is polled.

use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_core::{Error, ErrorKind, Result};
use forebay_fabric::{Address, Event, Fabric, Memory, Options, PeerId, RegionId, Rights};
use serde::{Deserialize, Serialize};

use super::pattern::{fill, wrong_bytes};
use super::plain;
use super::shape::{MOST_MEMORY_BYTES, cpu_s, odd};

#[derive(Debug, Serialize, Deserialize)]
pub enum Ask {
    /// Memory of so many bytes, and a plain socket.
    Prepare {
        bytes: u64,
    },
    /// The first half with the pattern, the second with zeros.
    Fill {
        half: u64,
        seed: u64,
    },
    /// The second half with the pattern.
    Compare {
        half: u64,
        seed: u64,
    },
    Cpu,
}

#[derive(Debug, Serialize, Deserialize)]
pub enum Tell {
    Prepared { descriptor: Vec<u8>, port: u16 },
    Filled,
    Compared { wrong: u64 },
    Cpu { seconds: f64 },
}

/// Until a first peer has come, of a process that serves only one.
const FIRST: Duration = Duration::from_secs(60);

/// Serves one peer after another at `address`, or only the first. Says where it listens when it does.
pub fn serve(options: Options, address: &Address, is_once: bool, on_listen: impl FnOnce(&Address)) -> Result<()> {
    let mut fabric = Fabric::new(options)?;
    let address = fabric.listen(address)?;
    on_listen(&address);
    let mut events = Vec::new();
    let mut served: Option<(PeerId, Served)> = None;
    let first = Instant::now() + FIRST;
    loop {
        let timeout = (is_once && served.is_none()).then(|| first.saturating_duration_since(Instant::now()));
        fabric.poll(timeout, &mut events)?;
        if events.is_empty() && is_once && served.is_none() {
            return Err(Error::new(ErrorKind::Timeout, "nobody connected"));
        }
        for event in events.drain(..) {
            match event {
                Event::Up { peer } if served.is_none() => served = Some((peer, Served::default())),
                // One measurement at a time: two would measure each other.
                Event::Up { peer } => fabric.disconnect(peer),
                Event::Message { peer, bytes } => {
                    fabric.taken(peer);
                    let answer = match (serde_json::from_slice(&bytes), &mut served) {
                        (Ok(ask), Some((it, served))) if *it == peer => served.answer(&mut fabric, &address, ask),
                        _ => Err(odd()),
                    };
                    match answer {
                        Ok(tell) => fabric.send(peer, serde_json::to_vec(&tell).expect("an answer is JSON"))?,
                        Err(_) => fabric.disconnect(peer),
                    }
                }
                Event::Gone { peer, .. } if served.as_ref().is_some_and(|(it, _)| *it == peer) => {
                    if let Some((_, Served { memory: Some((_, region)) })) = served.take() {
                        fabric.deregister(region)?;
                    }
                    if is_once {
                        return Ok(());
                    }
                }
                _ => {}
            }
        }
    }
}

#[derive(Default)]
struct Served {
    memory: Option<(Arc<Memory>, RegionId)>,
}

impl Served {
    fn answer(&mut self, fabric: &mut Fabric, address: &Address, ask: Ask) -> Result<Tell> {
        let half_of = |half: u64| match &self.memory {
            Some((memory, _)) if half.checked_mul(2).is_some_and(|bytes| bytes <= memory.len()) => Ok(memory),
            _ => Err(odd()),
        };
        match ask {
            Ask::Prepare { bytes } if self.memory.is_none() && bytes <= MOST_MEMORY_BYTES => {
                let memory = Arc::new(Memory::allocate(bytes)?);
                let region = fabric.register(&memory, 0, bytes, Rights::READ_AND_WRITE)?;
                let descriptor = fabric.export(region)?.to_bytes().to_vec();
                self.memory = Some((memory, region));
                let port = match address {
                    Address::Tcp(address) | Address::Ucx(address) => plain::serve(address.ip(), bytes / 2)?,
                    Address::Shm(_) => 0,
                };
                Ok(Tell::Prepared { descriptor, port })
            }
            Ask::Prepare { .. } => Err(odd()),
            Ask::Fill { half, seed } => {
                let memory = half_of(half)?;
                fill(memory, 0, half, Some(seed));
                fill(memory, half, half, None);
                Ok(Tell::Filled)
            }
            Ask::Compare { half, seed } => Ok(Tell::Compared { wrong: wrong_bytes(half_of(half)?, half, half, seed) }),
            Ask::Cpu => Ok(Tell::Cpu { seconds: cpu_s() }),
        }
    }
}
