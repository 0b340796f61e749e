//! A driver over host memory, in place of a GPU's. Streams run late, and out of order between each other; copies of a
//! call arrive in any order, in torn pieces; a source of a load may be read at any moment after the call. Kernels are
//! run from their text ([`super::ptx`]), some threads at a time, in any order.
//!
//! Invariants: nothing of a stream runs when it is queued, only when somebody waits or a test gives it a turn. A stream
//! runs in order, and up to an event only when that has been reached. A destination holds poison from the first piece
//! to the last. A copy that leaves an allocation or a registration is refused, and so is a call without a context. What
//! runs next is drawn from the seed; threads that wait at the same time share the draws.
//!
//! What it cannot show: visibility, speed, priorities, and that a driver is as it was read here.

use std::collections::{HashMap, VecDeque};
use std::ffi::CStr;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::{self, ThreadId};
use std::time::Duration;

use super::driver::{
    Answer, Attribute, Batch, CaptureMode, ContextHandle, Device, Driver, EventHandle, FunctionHandle, Grid, Location,
    ModuleHandle, Rows, SourceOrder, Status, StreamHandle,
};
use super::ptx::{Access, Program};
use crate::bench::Random;
use crate::copy::Memory;

/// What a destination holds while it is written.
const POISON: u8 = 0xdb;
/// A tear is a multiple of it.
const WORD_BYTES: u64 = 16;
/// Threads of a kernel that run for each piece of a copy that would.
const KERNEL_THREADS: usize = 32;
/// Tears of one element.
const TEARS: u64 = 6;
const CONTEXTS: u64 = 0xc000;

/// See the module documentation.
pub struct Fake {
    state: Mutex<State>,
    /// Something was queued or has run.
    turned: Condvar,
    /// Held while the driver does not start.
    start: Mutex<()>,
}

/// What goes wrong.
#[derive(Clone, Copy, Debug)]
pub enum Fault {
    /// The nth call of this name from now on answers so.
    Call(&'static str, u64, Status),
    /// Registrations of more than so many bytes answer so.
    Registration(u64, Status),
    /// Copies of batches have a wrong byte.
    Corruption,
    /// A thread of each kernel does not run.
    IdleThread,
    /// The driver has no batches.
    NoBatch,
    /// Rows of one copy are no further apart.
    MaxPitch(u64),
    /// The device is lost: calls answer so, and nothing runs any more.
    Lost(Status),
}

struct State {
    random: Random,
    devices: u32,
    faults: Vec<Fault>,
    areas: Vec<Area>,
    streams: HashMap<u64, Stream>,
    events: HashMap<u64, Event>,
    /// By module and by function, each of which has one kernel.
    modules: HashMap<u64, Arc<Program>>,
    functions: HashMap<u64, Arc<Program>>,
    /// Kernels that were queued.
    launches: u64,
    /// Copies of rows that were queued.
    row_copies: u64,
    threads: HashMap<ThreadId, Thread>,
    retained: i64,
    next_handle: u64,
    spoiled_captures: u64,
}

struct Area {
    memory: Memory,
    offset: u64,
    bytes: u64,
    kind: Kind,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Device(u32),
    Pinned,
    Registered,
}

#[derive(Default)]
struct Stream {
    queue: VecDeque<Work>,
    is_held: bool,
    is_capturing: bool,
}

#[derive(Default)]
struct Event {
    recorded: u64,
    reached: u64,
}

#[derive(Default)]
struct Thread {
    contexts: Vec<u64>,
    is_relaxed: bool,
}

enum Work {
    Copy { pieces: Vec<Piece>, has_begun: bool },
    Kernel(Launch),
    Record(u64, u64),
    Wait(u64, u64),
    Task(Box<dyn FnOnce() + Send>),
}

struct Launch {
    program: Arc<Program>,
    grid: Grid,
    arguments: Vec<u64>,
    /// Threads that have not run.
    threads: Vec<u32>,
}

struct Piece {
    to: Memory,
    to_offset: u64,
    from: Memory,
    from_offset: u64,
    bytes: u64,
    /// Read before its turn.
    early: Option<Vec<u8>>,
}

impl Fake {
    pub fn new(seed: u64) -> Fake {
        let state = State {
            random: Random(seed),
            devices: 2,
            faults: Vec::new(),
            areas: Vec::new(),
            streams: HashMap::from([(0, Stream::default())]),
            events: HashMap::new(),
            modules: HashMap::new(),
            functions: HashMap::new(),
            launches: 0,
            row_copies: 0,
            threads: HashMap::new(),
            retained: 0,
            next_handle: 0x1000,
            spoiled_captures: 0,
        };
        Fake { state: Mutex::new(state), turned: Condvar::new(), start: Mutex::default() }
    }

    /// The primary context of a device.
    pub fn context(&self, ordinal: u32) -> ContextHandle {
        ContextHandle(CONTEXTS + u64::from(ordinal))
    }

    pub fn fault(&self, fault: Fault) {
        self.lock().faults.push(fault);
        self.turned.notify_all();
    }

    /// The driver hangs in its start until this is dropped.
    pub fn hold_start(&self) -> MutexGuard<'_, ()> {
        self.start.lock().expect("nothing under this lock panics")
    }

    /// Ends all faults.
    pub fn heal(&self) {
        self.lock().faults.clear();
    }

    /// Queues something that the model does.
    pub fn task(&self, stream: StreamHandle, task: impl FnOnce() + Send + 'static) {
        self.lock().stream(stream).expect("the stream exists").queue.push_back(Work::Task(Box::new(task)));
        self.turned.notify_all();
    }

    /// Lets something run that can; whether there was any.
    pub fn turn(&self) -> bool {
        let has_turned = self.lock().turn();
        self.turned.notify_all();
        has_turned
    }

    /// Stops a stream, or lets it go on.
    pub fn hold(&self, stream: StreamHandle, is_held: bool) {
        self.lock().stream(stream).expect("the stream exists").is_held = is_held;
        self.turned.notify_all();
    }

    pub fn capture(&self, stream: StreamHandle, is_capturing: bool) {
        self.lock().stream(stream).expect("the stream exists").is_capturing = is_capturing;
    }

    /// Calls that would have spoiled somebody's capture.
    pub fn spoiled_captures(&self) -> u64 {
        self.lock().spoiled_captures
    }

    /// The memory behind an address that `alloc_device` gave.
    pub fn device_memory(&self, address: u64) -> Memory {
        let state = self.lock();
        let area = state.areas.iter().find(|area| area.start() == address).expect("the address was allocated");
        area.memory.clone()
    }

    /// Start and bytes of each registration, in the order in which they were made.
    pub fn registrations(&self) -> Vec<(u64, u64)> {
        let state = self.lock();
        let registered = state.areas.iter().filter(|area| area.kind == Kind::Registered);
        registered.map(|area| (area.start(), area.bytes)).collect()
    }

    /// Kernels that were queued.
    pub fn launches(&self) -> u64 {
        self.lock().launches
    }

    /// Copies of rows that were queued.
    pub fn row_copies(&self) -> u64 {
        self.lock().row_copies
    }

    /// How many parameters a function has; none if there is no such function.
    pub fn parameters(&self, function: FunctionHandle) -> Option<usize> {
        self.lock().functions.get(&function.0).map(|program| program.parameters)
    }

    /// Everything that is still open: streams, events, allocations, registrations, modules, contexts.
    pub fn open(&self) -> usize {
        let state = self.lock();
        let memory = state.areas.len() + state.modules.len();
        state.streams.len() - 1 + state.events.len() + memory + state.retained as usize
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("a task of a test has panicked")
    }

    /// The start of every call.
    fn call(&self, name: &'static str) -> Answer<MutexGuard<'_, State>> {
        let mut state = self.lock();
        let mut answer = None;
        state.faults.retain_mut(|fault| match fault {
            Fault::Call(fails, left, status) if *fails == name => {
                *left -= 1;
                answer = answer.or((*left == 0).then_some(*status));
                *left > 0
            }
            Fault::Lost(status) => {
                answer = Some(*status);
                true
            }
            _ => true,
        });
        answer.map_or(Ok(state), Err)
    }

    /// A call that needs a context and must not be made while somebody captures, unless the thread is relaxed.
    fn call_inside(&self, name: &'static str) -> Answer<MutexGuard<'_, State>> {
        let mut state = self.call(name)?;
        if state.current().is_none() {
            return Err(Status::INVALID_CONTEXT);
        }
        if !state.thread().is_relaxed && state.streams.values().any(|stream| stream.is_capturing) {
            state.spoiled_captures += 1;
            return Err(Status::CAPTURE_UNSUPPORTED);
        }
        Ok(state)
    }
}

impl Area {
    fn start(&self) -> u64 {
        self.memory.address() + self.offset
    }

    fn holds(&self, address: u64, bytes: u64) -> bool {
        self.start() <= address && address + bytes <= self.start() + self.bytes
    }
}

impl State {
    fn thread(&mut self) -> &mut Thread {
        self.threads.entry(thread::current().id()).or_default()
    }

    fn current(&mut self) -> Option<u64> {
        self.thread().contexts.last().copied()
    }

    fn handle(&mut self) -> u64 {
        self.next_handle += 1;
        self.next_handle
    }

    fn stream(&mut self, stream: StreamHandle) -> Answer<&mut Stream> {
        self.streams.get_mut(&stream.0).ok_or(Status::INVALID_HANDLE)
    }

    fn area(&self, address: u64, bytes: u64) -> Answer<&Area> {
        self.areas.iter().find(|area| area.holds(address, bytes)).ok_or(Status::INVALID_VALUE)
    }

    fn max_pitch(&self) -> u64 {
        let pitch = |fault: &Fault| if let Fault::MaxPitch(most) = fault { Some(*most) } else { None };
        self.faults.iter().find_map(pitch).unwrap_or(0x7fff_ffff)
    }

    fn has(&self, is_it: impl Fn(&Fault) -> bool) -> bool {
        self.faults.iter().any(is_it)
    }

    /// Runs something of a stream that can, drawn from all.
    fn turn(&mut self) -> bool {
        if self.has(|fault| matches!(fault, Fault::Lost(_))) {
            return false;
        }
        let can_run = |stream: &Stream| match stream.queue.front() {
            _ if stream.is_held => false,
            None => false,
            Some(Work::Wait(event, number)) => self.events.get(event).is_none_or(|event| event.reached >= *number),
            Some(_) => true,
        };
        let mut ready: Vec<u64> =
            self.streams.iter().filter(|(_, stream)| can_run(stream)).map(|(handle, _)| *handle).collect();
        if ready.is_empty() {
            return false;
        }
        ready.sort_unstable();
        let drawn = ready[(self.random.next() % ready.len() as u64) as usize];
        self.run(drawn);
        true
    }

    fn run(&mut self, handle: u64) {
        let pieces = 1 + self.random.next() % 64;
        let queue = &mut self.streams.get_mut(&handle).expect("it was drawn").queue;
        match queue.front_mut().expect("it can run") {
            Work::Copy { pieces: left, has_begun } => {
                if !std::mem::replace(has_begun, true) {
                    left.iter().for_each(|piece| piece.to.write(piece.to_offset, &vec![POISON; piece.bytes as usize]));
                }
                let kept = left.len().saturating_sub(pieces as usize);
                left.drain(kept..).for_each(|piece| piece.copy());
                if !left.is_empty() {
                    return;
                }
            }
            Work::Kernel(launch) => {
                let memory = &mut Areas { areas: &self.areas, last: 0 };
                let kept = launch.threads.len().saturating_sub(KERNEL_THREADS * pieces as usize);
                let run = |thread| launch.program.run(launch.grid, thread, &launch.arguments, memory);
                let ran = launch.threads.drain(kept..).try_for_each(run);
                if let Err(status) = ran {
                    return self.faults.push(Fault::Lost(status));
                }
                if !launch.threads.is_empty() {
                    return;
                }
            }
            Work::Record(event, number) => {
                if let Some(event) = self.events.get_mut(event) {
                    event.reached = event.reached.max(*number);
                }
            }
            Work::Wait(..) => {}
            Work::Task(_) => {
                let Some(Work::Task(task)) = queue.pop_front() else { unreachable!("it was looked at") };
                return task();
            }
        }
        queue.pop_front();
    }

    /// Tears an element into pieces, some of which may be read early.
    fn tear(&mut self, to: u64, from: u64, bytes: u64, order: SourceOrder, pieces: &mut Vec<Piece>) -> Answer<()> {
        let (target, source) = (self.area(to, bytes)?, self.area(from, bytes)?);
        if !matches!((target.kind, source.kind), (Kind::Device(_), _) | (_, Kind::Device(_))) {
            return Err(Status::INVALID_VALUE);
        }
        let (to_memory, from_memory) = (target.memory.clone(), source.memory.clone());
        let (to_offset, from_offset) = (to - to_memory.address(), from - from_memory.address());
        let mut at = 0;
        while at < bytes {
            let most = (bytes - at).min(WORD_BYTES.max(bytes.div_ceil(TEARS).next_multiple_of(WORD_BYTES)));
            let words = most.div_ceil(WORD_BYTES);
            let len = ((1 + self.random.next() % words) * WORD_BYTES).min(most);
            let is_early = order == SourceOrder::Any && self.random.next().is_multiple_of(2);
            let early = is_early.then(|| from_memory.span(from_offset + at, len).bytes().to_vec());
            let (to, from) = (to_memory.clone(), from_memory.clone());
            let (to_offset, from_offset) = (to_offset + at, from_offset + at);
            pieces.push(Piece { to, to_offset, from, from_offset, bytes: len, early });
            at += len;
        }
        Ok(())
    }

    fn shuffle<T>(&mut self, list: &mut [T]) {
        for at in (1..list.len()).rev() {
            list.swap(at, (self.random.next() % (at as u64 + 1)) as usize);
        }
    }

    fn queue(&mut self, mut pieces: Vec<Piece>, stream: StreamHandle) -> Answer<()> {
        self.shuffle(&mut pieces);
        self.stream(stream)?.queue.push_back(Work::Copy { pieces, has_begun: false });
        Ok(())
    }
}

/// Memory of the device and of the host that a kernel may touch.
struct Areas<'a> {
    areas: &'a [Area],
    /// Where the last access was: the next one is near.
    last: usize,
}

impl Areas<'_> {
    fn find(&mut self, address: u64, bytes: usize) -> Answer<(&Memory, u64)> {
        let holds = |area: &Area| area.holds(address, bytes as u64);
        if !self.areas.get(self.last).is_some_and(holds) {
            self.last = self.areas.iter().position(holds).ok_or(Status::ILLEGAL_ADDRESS)?;
        }
        let memory = &self.areas[self.last].memory;
        Ok((memory, address - memory.address()))
    }
}

impl Access for Areas<'_> {
    fn load(&mut self, address: u64, bytes: &mut [u8]) -> Answer<()> {
        let (memory, offset) = self.find(address, bytes.len())?;
        memory.span(offset, bytes.len() as u64).read(bytes);
        Ok(())
    }

    fn store(&mut self, address: u64, bytes: &[u8]) -> Answer<()> {
        let (memory, offset) = self.find(address, bytes.len())?;
        memory.write(offset, bytes);
        Ok(())
    }
}

impl Piece {
    fn copy(&self) {
        let from = self.from.span(self.from_offset, self.bytes);
        match &self.early {
            Some(early) => self.to.write(self.to_offset, early),
            None => self.to.span(self.to_offset, self.bytes).copy_from(from),
        }
    }
}

impl Driver for Fake {
    fn init(&self) -> Answer<()> {
        drop(self.hold_start());
        self.call("init").map(drop)
    }

    fn version(&self) -> Answer<u32> {
        self.call("version").map(|_| 13000)
    }

    fn error_name(&self, status: Status) -> String {
        format!("fake error {}", status.0)
    }

    fn has_batch(&self) -> bool {
        !self.lock().has(|fault| matches!(fault, Fault::NoBatch))
    }

    fn device_count(&self) -> Answer<u32> {
        self.call("device_count").map(|state| state.devices)
    }

    fn device(&self, ordinal: u32) -> Answer<Device> {
        let state = self.call("device")?;
        if ordinal < state.devices { Ok(Device(ordinal as i32)) } else { Err(Status::INVALID_VALUE) }
    }

    fn attribute(&self, _device: Device, attribute: Attribute) -> Answer<i32> {
        let state = self.call("attribute")?;
        Ok(if attribute == Attribute::MaxPitch { state.max_pitch() as i32 } else { attribute as i32 })
    }

    fn name(&self, device: Device) -> Answer<String> {
        self.call("name").map(|_| format!("fake GPU {}", device.0))
    }

    fn pci_bus_id(&self, device: Device) -> Answer<String> {
        self.call("pci_bus_id").map(|_| format!("fake:{:02x}:00.0", device.0))
    }

    fn uuid(&self, device: Device) -> Answer<[u8; 16]> {
        self.call("uuid").map(drop)?;
        let mut uuid = [0xfa; 16];
        uuid[15] = device.0 as u8;
        Ok(uuid)
    }

    fn retain_primary(&self, device: Device) -> Answer<ContextHandle> {
        self.call("retain_primary")?.retained += 1;
        Ok(self.context(device.0 as u32))
    }

    fn release_primary(&self, _device: Device) -> Answer<()> {
        self.lock().retained -= 1;
        Ok(())
    }

    fn set_current(&self, context: ContextHandle) -> Answer<()> {
        self.call("set_current")?.thread().contexts = vec![context.0];
        Ok(())
    }

    fn push_current(&self, context: ContextHandle) -> Answer<()> {
        self.call("push_current")?.thread().contexts.push(context.0);
        Ok(())
    }

    fn pop_current(&self) -> Answer<()> {
        self.lock().thread().contexts.pop().map(drop).ok_or(Status::INVALID_CONTEXT)
    }

    fn exchange_capture_mode(&self, mode: CaptureMode) -> Answer<CaptureMode> {
        let mut state = self.call("exchange_capture_mode")?;
        let was_relaxed = std::mem::replace(&mut state.thread().is_relaxed, mode == CaptureMode::Relaxed);
        Ok(if was_relaxed { CaptureMode::Relaxed } else { CaptureMode::Global })
    }

    fn least_priority(&self) -> Answer<i32> {
        self.call_inside("least_priority").map(|_| 0)
    }

    fn create_stream(&self, _priority: i32) -> Answer<StreamHandle> {
        let mut state = self.call_inside("create_stream")?;
        let handle = state.handle();
        state.streams.insert(handle, Stream::default());
        Ok(StreamHandle(handle))
    }

    fn destroy_stream(&self, stream: StreamHandle) -> Answer<()> {
        let mut state = self.call_inside("destroy_stream")?;
        let is_idle = state.stream(stream)?.queue.is_empty();
        assert!(is_idle, "a stream was destroyed with work in it");
        state.streams.remove(&stream.0);
        Ok(())
    }

    fn stream_wait(&self, stream: StreamHandle, event: EventHandle) -> Answer<()> {
        let mut state = self.call_inside("stream_wait")?;
        let number = state.events.get(&event.0).ok_or(Status::INVALID_HANDLE)?.recorded;
        state.stream(stream)?.queue.push_back(Work::Wait(event.0, number));
        Ok(())
    }

    fn query_stream(&self, stream: StreamHandle) -> Answer<()> {
        let mut state = self.call_inside("query_stream")?;
        state.turn();
        if state.stream(stream)?.queue.is_empty() { Ok(()) } else { Err(Status::NOT_READY) }
    }

    fn is_capturing(&self, stream: StreamHandle) -> Answer<bool> {
        Ok(self.call_inside("is_capturing")?.stream(stream)?.is_capturing)
    }

    fn create_event(&self) -> Answer<EventHandle> {
        let mut state = self.call_inside("create_event")?;
        let handle = state.handle();
        state.events.insert(handle, Event::default());
        Ok(EventHandle(handle))
    }

    fn destroy_event(&self, event: EventHandle) -> Answer<()> {
        self.call_inside("destroy_event")?.events.remove(&event.0).map(drop).ok_or(Status::INVALID_HANDLE)
    }

    fn record(&self, event: EventHandle, stream: StreamHandle) -> Answer<()> {
        let mut state = self.call_inside("record")?;
        let recorded = state.events.get_mut(&event.0).ok_or(Status::INVALID_HANDLE)?;
        recorded.recorded += 1;
        let number = recorded.recorded;
        state.stream(stream)?.queue.push_back(Work::Record(event.0, number));
        drop(state);
        self.turned.notify_all();
        Ok(())
    }

    fn query_event(&self, event: EventHandle) -> Answer<()> {
        let mut state = self.call_inside("query_event")?;
        state.turn();
        let event = state.events.get(&event.0).ok_or(Status::INVALID_HANDLE)?;
        if event.reached >= event.recorded { Ok(()) } else { Err(Status::NOT_READY) }
    }

    fn synchronize(&self, event: EventHandle) -> Answer<()> {
        let number = self.call_inside("synchronize")?.events.get(&event.0).ok_or(Status::INVALID_HANDLE)?.recorded;
        loop {
            let mut state = self.call("synchronizing")?;
            if state.events.get(&event.0).is_none_or(|event| event.reached >= number) {
                return Ok(());
            }
            if state.turn() {
                drop(state);
                self.turned.notify_all();
                thread::yield_now();
            } else {
                drop(self.turned.wait_timeout(state, Duration::from_millis(5)));
            }
        }
    }

    fn register(&self, memory: &Memory, offset: u64, bytes: u64) -> Answer<()> {
        let mut state = self.call_inside("register")?;
        for fault in &state.faults {
            if let Fault::Registration(most, status) = fault
                && bytes > *most
            {
                return Err(*status);
            }
        }
        let start = memory.address() + offset;
        if state.areas.iter().any(|area| area.start() < start + bytes && start < area.start() + area.bytes) {
            return Err(Status::ALREADY_REGISTERED);
        }
        state.areas.push(Area { memory: memory.clone(), offset, bytes, kind: Kind::Registered });
        Ok(())
    }

    fn unregister(&self, address: u64) -> Answer<()> {
        self.call_inside("unregister")?.remove(address, Kind::Registered)
    }

    fn alloc_host(&self, bytes: u64) -> Answer<Memory> {
        let mut state = self.call_inside("alloc_host")?;
        let memory = Memory::anonymous(bytes as usize).map_err(|_| Status::OUT_OF_MEMORY)?;
        state.areas.push(Area { memory: memory.clone(), offset: 0, bytes, kind: Kind::Pinned });
        Ok(memory)
    }

    fn free_host(&self, memory: &Memory) -> Answer<()> {
        self.call_inside("free_host")?.remove(memory.address(), Kind::Pinned)
    }

    fn alloc_device(&self, bytes: u64) -> Answer<u64> {
        let mut state = self.call_inside("alloc_device")?;
        let memory = Memory::anonymous(bytes as usize).map_err(|_| Status::OUT_OF_MEMORY)?;
        let (address, ordinal) = (memory.address(), state.current().expect("checked") - CONTEXTS);
        state.areas.push(Area { memory, offset: 0, bytes, kind: Kind::Device(ordinal as u32) });
        Ok(address)
    }

    fn free_device(&self, address: u64) -> Answer<()> {
        let mut state = self.call_inside("free_device")?;
        let kind = state.area(address, 1)?.kind;
        state.remove(address, kind)
    }

    fn location(&self, address: u64) -> Answer<Location> {
        let state = self.call("location")?;
        Ok(match state.area(address, 1)?.kind {
            Kind::Device(ordinal) => Location::Device(ordinal),
            _ => Location::Host,
        })
    }

    fn copy(&self, to: u64, from: u64, bytes: u64, stream: StreamHandle) -> Answer<()> {
        let mut state = self.call_inside("copy")?;
        let mut pieces = Vec::new();
        state.tear(to, from, bytes, SourceOrder::Stream, &mut pieces)?;
        state.queue(pieces, stream)
    }

    fn copy_batch(&self, batch: &mut Batch, order: SourceOrder, stream: StreamHandle) -> Answer<()> {
        let mut state = self.call_inside("copy_batch")?;
        // A batch has no order, and the legacy stream takes none.
        if stream.0 == 0 || state.has(|fault| matches!(fault, Fault::NoBatch)) {
            return Err(Status::INVALID_VALUE);
        }
        let mut pieces = Vec::new();
        for at in 0..batch.bytes.len() {
            state.tear(batch.to[at], batch.from[at], batch.bytes[at] as u64, order, &mut pieces)?;
        }
        if state.has(|fault| matches!(fault, Fault::Corruption))
            && let Some(piece) = pieces.first_mut()
        {
            let mut bytes = piece.from.span(piece.from_offset, piece.bytes).bytes().to_vec();
            bytes[0] = bytes[0].wrapping_add(1);
            piece.early = Some(bytes);
        }
        state.queue(pieces, stream)
    }

    fn copy_rows(&self, rows: &Rows, stream: StreamHandle) -> Answer<()> {
        let mut state = self.call_inside("copy_rows")?;
        let fits = |pitch: u64| (rows.row_bytes..=state.max_pitch()).contains(&pitch);
        if !fits(rows.to_pitch) || !fits(rows.from_pitch) || rows.rows == 0 {
            return Err(Status::INVALID_VALUE);
        }
        // All rows of an end are in one allocation or registration.
        let spanned = |pitch: u64| (rows.rows - 1) * pitch + rows.row_bytes;
        state.area(rows.to, spanned(rows.to_pitch))?;
        state.area(rows.from, spanned(rows.from_pitch))?;
        let mut pieces = Vec::new();
        for row in 0..rows.rows {
            let (to, from) = (rows.to + row * rows.to_pitch, rows.from + row * rows.from_pitch);
            state.tear(to, from, rows.row_bytes, SourceOrder::Stream, &mut pieces)?;
        }
        state.row_copies += 1;
        state.queue(pieces, stream)
    }

    fn load_module(&self, text: &CStr) -> Answer<ModuleHandle> {
        let mut state = self.call_inside("load_module")?;
        let text = text.to_str().map_err(|_| Status::INVALID_PTX)?;
        let program = Program::read(text).map_err(|unknown| {
            eprintln!("fake libcuda does not know {unknown}");
            Status::INVALID_PTX
        })?;
        let handle = state.handle();
        state.modules.insert(handle, Arc::new(program));
        Ok(ModuleHandle(handle))
    }

    fn unload_module(&self, module: ModuleHandle) -> Answer<()> {
        let mut state = self.call_inside("unload_module")?;
        let unloaded = state.modules.remove(&module.0).ok_or(Status::INVALID_HANDLE)?;
        state.functions.retain(|_, program| !Arc::ptr_eq(program, &unloaded));
        Ok(())
    }

    fn function(&self, module: ModuleHandle, name: &CStr) -> Answer<FunctionHandle> {
        let mut state = self.call_inside("function")?;
        let program = state.modules.get(&module.0).ok_or(Status::INVALID_HANDLE)?.clone();
        if name.to_str() != Ok(&program.name) {
            return Err(Status::NOT_FOUND);
        }
        let handle = state.handle();
        state.functions.insert(handle, program);
        Ok(FunctionHandle(handle))
    }

    fn launch(&self, function: FunctionHandle, grid: Grid, arguments: &[u64], stream: StreamHandle) -> Answer<()> {
        let mut state = self.call_inside("launch")?;
        let program = state.functions.get(&function.0).ok_or(Status::INVALID_HANDLE)?.clone();
        let is_possible = grid.blocks > 0 && (1..=program.threads).contains(&grid.threads);
        if !is_possible || arguments.len() != program.parameters {
            return Err(Status::INVALID_VALUE);
        }
        // The first thread has work in every grid.
        let idle = u32::from(state.has(|fault| matches!(fault, Fault::IdleThread)));
        let mut threads: Vec<u32> = (idle..grid.blocks * grid.threads).collect();
        state.shuffle(&mut threads);
        state.launches += 1;
        let launch = Launch { program, grid, arguments: arguments.to_vec(), threads };
        state.stream(stream)?.queue.push_back(Work::Kernel(launch));
        drop(state);
        self.turned.notify_all();
        Ok(())
    }
}

impl State {
    fn remove(&mut self, start: u64, kind: Kind) -> Answer<()> {
        let at = self.areas.iter().position(|area| area.start() == start && area.kind == kind);
        self.areas.remove(at.ok_or(Status::INVALID_VALUE)?);
        Ok(())
    }
}
