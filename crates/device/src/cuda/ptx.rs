//! An interpreter for PTX, as far as the kernels of this crate use it, so that the fake driver runs the text that a
//! real one would compile.
//!
//! Invariants: a text with an instruction that is not known here is refused when it is read, not when it runs. Threads
//! run one after another, each to its end, so nothing is shown of barriers and shared memory, which are not known here.
//! Every access asks for its address and is aligned, as a device demands; a thread without end is ended.

use std::collections::HashMap;

use super::driver::{Answer, Grid, Status};

/// Steps of one thread: a million times what a piece takes.
const MOST_STEPS: u64 = 1 << 32;

/// The memory of the device and of the host, as a kernel sees it.
pub trait Access {
    fn load(&mut self, address: u64, bytes: &mut [u8]) -> Answer<()>;
    fn store(&mut self, address: u64, bytes: &[u8]) -> Answer<()>;
}

/// The kernel of a text.
#[derive(Debug)]
pub struct Program {
    pub name: String,
    pub parameters: usize,
    /// The most that a block may have.
    pub threads: u32,
    registers: usize,
    steps: Vec<Step>,
}

#[derive(Debug)]
struct Step {
    /// A predicate, and what it has to be.
    guard: Option<(usize, bool)>,
    action: Action,
}

#[derive(Debug)]
enum Action {
    Parameter {
        to: usize,
        position: usize,
    },
    /// Words of `bytes` each.
    Load {
        to: Vec<usize>,
        bytes: usize,
        base: usize,
        offset: u64,
    },
    Store {
        from: Vec<usize>,
        bytes: usize,
        base: usize,
        offset: u64,
    },
    /// `of`: operands before the call, cut to `mask` afterwards.
    Compute {
        to: usize,
        operation: Operation,
        of: [Operand; 3],
        mask: u64,
    },
    Branch {
        to: usize,
    },
    Return,
}

#[derive(Clone, Copy, Debug)]
enum Operation {
    Move,
    Add,
    Multiply,
    /// The first two multiplied, and the third added.
    MultiplyAdd,
    /// The same of numbers with 32 bits in floating point, rounded once.
    Fused,
    ShiftLeft,
    IsLess,
    IsNotLess,
}

#[derive(Clone, Copy, Debug)]
enum Operand {
    Register(usize),
    Number(u64),
    BlockIndex,
    Blocks,
    ThreadIndex,
    Threads,
}

impl Program {
    /// `Err` says what is not known here.
    pub fn read(text: &str) -> Result<Program, String> {
        Reader::default().read(text)
    }

    /// Runs one thread of a grid: `thread` counts through all blocks.
    pub fn run(&self, grid: Grid, thread: u32, arguments: &[u64], memory: &mut dyn Access) -> Answer<()> {
        let mut registers = vec![0u64; self.registers];
        let (mut at, mut left) = (0, MOST_STEPS);
        while let Some(step) = self.steps.get(at) {
            at += 1;
            left -= 1;
            if left == 0 {
                return Err(Status::LAUNCH_TIMEOUT);
            }
            if step.guard.is_some_and(|(predicate, wanted)| (registers[predicate] != 0) != wanted) {
                continue;
            }
            match &step.action {
                Action::Parameter { to, position } => registers[*to] = arguments[*position],
                Action::Load { to, bytes, base, offset } => {
                    let address = place(&registers, *base, *offset, to.len() * bytes)?;
                    let mut words = [0; 16];
                    memory.load(address, &mut words[..to.len() * bytes])?;
                    for (to, word) in to.iter().zip(words.chunks_exact(*bytes)) {
                        let mut value = [0; 8];
                        value[..*bytes].copy_from_slice(word);
                        registers[*to] = u64::from_le_bytes(value);
                    }
                }
                Action::Store { from, bytes, base, offset } => {
                    let address = place(&registers, *base, *offset, from.len() * bytes)?;
                    let mut words = [0; 16];
                    for (from, word) in from.iter().zip(words.chunks_exact_mut(*bytes)) {
                        word.copy_from_slice(&registers[*from].to_le_bytes()[..*bytes]);
                    }
                    memory.store(address, &words[..from.len() * bytes])?;
                }
                Action::Compute { to, operation, of, mask } => {
                    let [a, b, c] = of.map(|operand| match operand {
                        Operand::Register(register) => registers[register],
                        Operand::Number(number) => number,
                        Operand::BlockIndex => u64::from(thread / grid.threads),
                        Operand::Blocks => u64::from(grid.blocks),
                        Operand::ThreadIndex => u64::from(thread % grid.threads),
                        Operand::Threads => u64::from(grid.threads),
                    });
                    registers[*to] = mask
                        & match operation {
                            Operation::Move => a,
                            Operation::Add => a.wrapping_add(b),
                            Operation::Multiply => a.wrapping_mul(b),
                            Operation::MultiplyAdd => a.wrapping_mul(b).wrapping_add(c),
                            Operation::Fused => {
                                let [a, b, c] = [a, b, c].map(|bits| f32::from_bits(bits as u32));
                                u64::from(a.mul_add(b, c).to_bits())
                            }
                            Operation::ShiftLeft => a.checked_shl(b as u32).unwrap_or(0),
                            Operation::IsLess => u64::from(a < b),
                            Operation::IsNotLess => u64::from(a >= b),
                        };
                }
                Action::Branch { to } => at = *to,
                Action::Return => return Ok(()),
            }
        }
        Ok(())
    }
}

fn place(registers: &[u64], base: usize, offset: u64, bytes: usize) -> Answer<u64> {
    let address = registers[base].wrapping_add(offset);
    if address.is_multiple_of(bytes as u64) { Ok(address) } else { Err(Status::MISALIGNED_ADDRESS) }
}

/// What a text has named so far.
#[derive(Default)]
struct Reader {
    registers: HashMap<String, usize>,
    parameters: Vec<String>,
    labels: HashMap<String, usize>,
}

impl Reader {
    fn read(mut self, text: &str) -> Result<Program, String> {
        let (head, body) = text.split_once(".entry").ok_or("there is no kernel")?;
        if !head.contains(".address_size 64") {
            return Err("addresses do not have 64 bits".to_string());
        }
        let (head, body) = body.split_once('{').ok_or("the kernel has no body")?;
        let (name, parameters) = head.split_once('(').ok_or("the kernel has no parameters")?;
        let (parameters, limits) = parameters.split_once(')').ok_or("the parameters do not end")?;
        for parameter in parameters.split(',') {
            let name = parameter.trim().strip_prefix(".param .u64 ");
            self.parameters.push(name.ok_or(format!("a parameter `{parameter}`"))?.to_string());
        }
        let threads = limits.trim().strip_prefix(".maxntid ").and_then(|limit| limit.split(',').next()?.parse().ok());
        let threads = threads.ok_or("the kernel has no limit of threads")?;
        let lines = || {
            let code = body.lines().map(|line| line.split("//").next().unwrap_or_default().trim());
            code.filter(|line| !line.is_empty() && !line.starts_with('.') && *line != "}")
        };
        // Labels first, since a branch may lead to one that comes later.
        let mut count = 0;
        for line in lines() {
            match line.strip_suffix(':') {
                Some(label) => drop(self.labels.insert(label.to_string(), count)),
                None => count += 1,
            }
        }
        let steps = lines().filter(|line| !line.ends_with(':')).map(|line| self.step(line));
        let steps = steps.collect::<Result<_, _>>()?;
        let (name, parameters, registers) = (name.trim().to_string(), self.parameters.len(), self.registers.len());
        Ok(Program { name, parameters, threads, registers, steps })
    }

    fn step(&mut self, line: &str) -> Result<Step, String> {
        let unknown = || format!("the instruction `{line}`");
        let code = line.strip_suffix(';').ok_or_else(unknown)?;
        let (guard, code) = match code.strip_prefix('@') {
            None => (None, code),
            Some(guarded) => {
                let (guard, code) = guarded.split_once(char::is_whitespace).ok_or_else(unknown)?;
                let (name, wanted) = guard.strip_prefix('!').map_or((guard, true), |name| (name, false));
                (Some((self.register(name).ok_or_else(unknown)?, wanted)), code.trim_start())
            }
        };
        let (name, operands) = code.split_once(char::is_whitespace).unwrap_or((code, ""));
        let action = self.action(name, &operands_of(operands)).ok_or_else(unknown)?;
        Ok(Step { guard, action })
    }

    fn action(&mut self, name: &str, operands: &[&str]) -> Option<Action> {
        let wide = ["u64", "s64", "b64"].iter().any(|kind| name.ends_with(kind));
        let mask = if wide { u64::MAX } else { u64::from(u32::MAX) };
        let compute = |reader: &mut Reader, operation, count: usize, mask| {
            let (to, of) = operands.split_first().filter(|(_, of)| of.len() == count)?;
            let mut values = [Operand::Number(0); 3];
            for (value, operand) in values.iter_mut().zip(of) {
                *value = reader.operand(operand)?;
            }
            Some(Action::Compute { to: reader.register(to)?, operation, of: values, mask })
        };
        match (name, operands) {
            ("ret", []) => Some(Action::Return),
            ("bra", [label]) => Some(Action::Branch { to: *self.labels.get(*label)? }),
            ("ld.param.u64", [to, parameter]) => {
                let parameter = parameter.strip_prefix('[')?.strip_suffix(']')?;
                let position = self.parameters.iter().position(|known| known == parameter)?;
                Some(Action::Parameter { to: self.register(to)?, position })
            }
            ("ld.global.v2.u64", [to, from]) => self.load(to, from, 2, 8),
            ("ld.global.u64", [to, from]) => self.load(to, from, 1, 8),
            ("ld.global.v4.f32", [to, from]) => self.load(to, from, 4, 4),
            ("ld.global.f32", [to, from]) => self.load(to, from, 1, 4),
            ("ld.global.L1::no_allocate.v4.u32", [to, from]) => self.load(to, from, 4, 4),
            ("st.global.cs.v4.u32", [to, from]) => self.store(to, from, 4, 4),
            ("st.global.f32", [to, from]) => self.store(to, from, 1, 4),
            ("mov.u32" | "mov.u64" | "mov.f32" | "cvta.to.global.u64", _) => compute(self, Operation::Move, 1, mask),
            // The narrower of the two types decides what is left.
            ("cvt.u64.u32" | "cvt.u32.u64", _) => compute(self, Operation::Move, 1, u64::from(u32::MAX)),
            ("add.s32" | "add.s64", _) => compute(self, Operation::Add, 2, mask),
            ("mul.lo.s32" | "mul.lo.s64", _) => compute(self, Operation::Multiply, 2, mask),
            ("mul.wide.u32", _) => compute(self, Operation::Multiply, 2, u64::MAX),
            ("mad.lo.s32", _) => compute(self, Operation::MultiplyAdd, 3, mask),
            ("fma.rn.f32", _) => compute(self, Operation::Fused, 3, mask),
            ("shl.b32" | "shl.b64", _) => compute(self, Operation::ShiftLeft, 2, mask),
            ("setp.lt.u32" | "setp.lt.u64", _) => compute(self, Operation::IsLess, 2, 1),
            ("setp.ge.u32" | "setp.ge.u64", _) => compute(self, Operation::IsNotLess, 2, 1),
            _ => None,
        }
    }

    fn load(&mut self, to: &str, from: &str, words: usize, bytes: usize) -> Option<Action> {
        let (base, offset) = self.address(from)?;
        Some(Action::Load { to: self.vector(to, words)?, bytes, base, offset })
    }

    fn store(&mut self, to: &str, from: &str, words: usize, bytes: usize) -> Option<Action> {
        let (base, offset) = self.address(to)?;
        Some(Action::Store { from: self.vector(from, words)?, bytes, base, offset })
    }

    /// The registers of `{%r1, %r2}`, or of `%r1` alone.
    fn vector(&mut self, text: &str, words: usize) -> Option<Vec<usize>> {
        let names = text.trim_start_matches('{').trim_end_matches('}').split(',');
        let registers = names.map(|name| self.register(name.trim())).collect::<Option<Vec<_>>>()?;
        (registers.len() == words).then_some(registers)
    }

    /// `[%rd1+16]`
    fn address(&mut self, text: &str) -> Option<(usize, u64)> {
        let text = text.strip_prefix('[')?.strip_suffix(']')?;
        let (base, offset) = text.split_once('+').unwrap_or((text, "0"));
        Some((self.register(base)?, offset.parse().ok()?))
    }

    fn operand(&mut self, text: &str) -> Option<Operand> {
        Some(match text {
            "%ctaid.x" => Operand::BlockIndex,
            "%nctaid.x" => Operand::Blocks,
            "%tid.x" => Operand::ThreadIndex,
            "%ntid.x" => Operand::Threads,
            _ if text.starts_with('%') => Operand::Register(self.register(text)?),
            // The bits of a number in floating point.
            _ if text.starts_with("0f") => Operand::Number(u64::from_str_radix(&text[2..], 16).ok()?),
            _ => Operand::Number(text.parse().ok()?),
        })
    }

    fn register(&mut self, name: &str) -> Option<usize> {
        let next = self.registers.len();
        (name.starts_with('%') && !name.contains('.')).then(|| *self.registers.entry(name.to_string()).or_insert(next))
    }
}

/// Cuts at the commas that stand outside braces.
fn operands_of(text: &str) -> Vec<&str> {
    let mut depth = 0;
    let cut = |c: char| {
        depth += i32::from(c == '{') - i32::from(c == '}');
        c == ',' && depth == 0
    };
    text.split(cut).map(str::trim).filter(|operand| !operand.is_empty()).collect()
}
