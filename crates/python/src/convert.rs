//! Converts Python's values to Rust's and back. All input from Python is checked here.

use std::collections::BTreeMap;
use std::time::Duration;

use forebay_core::Error;
use forebay_rpc::Hashes;
use forebay_rpc::proto::Held;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyMapping, PyTuple};

use crate::error::Raised;
use crate::mask::Mask;

/// Copies each hash once, directly into the buffer that will be sent.
pub fn hashes(sequence: &Bound<'_, PyAny>) -> PyResult<Hashes> {
    packed(sequence, Hashes::push)
}

/// Like [`hashes`], renamed for an adapter if there is a mask.
pub fn masked(sequence: &Bound<'_, PyAny>, mask: Option<&Mask>) -> PyResult<Hashes> {
    match mask {
        None => hashes(sequence),
        Some(mask) => packed(sequence, |packed, hash| packed.push(mask.apply(hash).as_bytes())),
    }
}

fn packed(sequence: &Bound<'_, PyAny>, add: impl Fn(&mut Hashes, &[u8]) -> Result<(), Error>) -> PyResult<Hashes> {
    let mut packed = Hashes::with_capacity(sequence.len()?);
    let push = |hash: Bound<'_, PyAny>| -> PyResult<()> {
        Ok(add(&mut packed, hash.cast::<PyBytes>()?.as_bytes()).map_err(Raised::from)?)
    };
    if let Ok(list) = sequence.cast::<PyList>() {
        list.iter().try_for_each(push)?;
    } else if let Ok(tuple) = sequence.cast::<PyTuple>() {
        tuple.iter().try_for_each(push)?;
    } else {
        sequence.try_iter()?.flatten().try_for_each(push)?;
    }
    Ok(packed)
}

/// The number of one start of an engine.
pub fn incarnation(bytes: &[u8]) -> Result<[u8; 16], Raised> {
    let wrong = || Error::invalid("an incarnation has 16 bytes").with("bytes", bytes.len());
    Ok(bytes.try_into().map_err(|_| wrong())?)
}

/// Any mapping of strings.
pub fn fields(mapping: &Bound<'_, PyAny>) -> PyResult<BTreeMap<String, String>> {
    mapping.cast::<PyMapping>()?.items()?.iter().map(|item| item.extract()).collect()
}

/// Any mapping of numbers.
pub fn numbers(mapping: &Bound<'_, PyAny>) -> PyResult<Vec<(u32, u64)>> {
    mapping.cast::<PyMapping>()?.items()?.iter().map(|item| item.extract()).collect()
}

/// Slots and generations, both little-endian u32 and parallel.
pub fn held(slots: &[u8], generations: &[u8]) -> Result<Vec<Held>, Raised> {
    let (slots, generations) = (words(slots)?, words(generations)?);
    if slots.len() != generations.len() {
        return Err(Error::invalid("there is one generation for each slot")
            .with("slots", slots.len())
            .with("generations", generations.len())
            .into());
    }
    Ok(slots.into_iter().zip(generations).map(|(slot, generation)| Held { slot, generation }).collect())
}

/// Little-endian u32.
pub fn words(bytes: &[u8]) -> Result<Vec<u32>, Raised> {
    let (words, rest) = bytes.as_chunks::<4>();
    if !rest.is_empty() {
        return Err(Error::invalid("a list of 32-bit numbers has a multiple of 4 bytes")
            .with("bytes", bytes.len())
            .into());
    }
    Ok(words.iter().map(|word| u32::from_le_bytes(*word)).collect())
}

/// Seconds from Python: negative is zero, too large is unlimited.
pub fn duration(seconds: f64) -> Duration {
    if seconds <= 0.0 || seconds.is_nan() {
        return Duration::ZERO;
    }
    Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
}

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub fn from_hex(text: &str) -> Result<Vec<u8>, Raised> {
    let no_hex = || {
        let error = Error::invalid("an id is written in pairs of hexadecimal digits").with("id", text);
        Raised::from(error.hint("give the whole id, as `inspect` shows it: 32 digits"))
    };
    let digits: Vec<u8> = text
        .chars()
        .map(|digit| digit.to_digit(16).map(|digit| digit as u8))
        .collect::<Option<_>>()
        .ok_or_else(no_hex)?;
    let (pairs, rest) = digits.as_chunks::<2>();
    if !rest.is_empty() {
        return Err(no_hex());
    }
    Ok(pairs.iter().map(|[high, low]| high << 4 | low).collect())
}
