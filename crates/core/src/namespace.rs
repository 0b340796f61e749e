//! A namespace: all that must be equal for two KV caches to be interchangeable, as a descriptor and its digest.
//!
//! The descriptor is a set of typed fields (`model`, `kv_dtype`, `layout`, `tenant`, …); if any field differs, it is
//! another namespace. The digest covers names, lengths and values, so that two different descriptors never give the
//! same bytes.

use std::collections::BTreeMap;
use std::fmt;

use sha2::{Digest, Sha256};

use crate::error::{Error, ErrorKind, Result};
use crate::key::NamespaceId;

/// Field name to value. Ordered, so that the order of declaration does not matter.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Descriptor {
    fields: BTreeMap<String, String>,
}

impl Descriptor {
    /// A descriptor is shown to people and kept in the pool's table; this bounds both.
    pub const MAX_BYTES: usize = 8192;
    /// The field that separates tenants; quotas and `purge` go by it.
    pub const TENANT: &'static str = "tenant";

    /// Errors with `Invalid` if a name is empty or not `[a-z0-9_.]`, or the whole is over 8 KiB.
    pub fn new(fields: impl IntoIterator<Item = (String, String)>) -> Result<Descriptor> {
        let fields: BTreeMap<String, String> = fields.into_iter().collect();
        for name in fields.keys() {
            let is_plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_' || c == '.';
            if name.is_empty() || !name.chars().all(is_plain) {
                return Err(Error::invalid("a namespace field is named with a-z, 0-9, `_` and `.`").with("field", name));
            }
        }
        let bytes: usize = fields.iter().map(|(name, value)| name.len() + value.len() + 16).sum();
        if fields.is_empty() || bytes > Descriptor::MAX_BYTES {
            let error = Error::invalid("a namespace descriptor has 1 byte to 8 KiB").with("bytes", bytes);
            return Err(error.hint("give one field at least, such as `model`, and a digest in place of a long value"));
        }
        Ok(Descriptor { fields })
    }

    /// The digest: the first 16 bytes of SHA-256 over names, lengths and values.
    pub fn id(&self) -> NamespaceId {
        let mut hasher = Sha256::new();
        hasher.update(b"forebay-namespace-1");
        for (name, value) in &self.fields {
            for part in [name, value] {
                hasher.update((part.len() as u64).to_le_bytes());
                hasher.update(part.as_bytes());
            }
        }
        let digest = hasher.finalize();
        let mut id = [0; 16];
        id.copy_from_slice(&digest[..16]);
        NamespaceId(u128::from_be_bytes(id))
    }

    /// One line a field, as it is kept in the pool's table; [`Descriptor::from_text`] reads it back.
    pub fn to_text(&self) -> String {
        let escape = |value: &str| value.replace('\\', "\\\\").replace('\n', "\\n");
        self.fields.iter().map(|(name, value)| format!("{name}={}\n", escape(value))).collect()
    }

    /// Errors with `Corrupt` on text that `to_text` did not write.
    pub fn from_text(text: &str) -> Result<Descriptor> {
        let field = |line: &str| {
            let (name, value) = line.split_once('=')?;
            Some((name.to_owned(), unescape(value)?))
        };
        let fields: Option<Vec<_>> = text.split_terminator('\n').map(field).collect();
        let fields = fields.ok_or_else(|| Error::new(ErrorKind::Corrupt, "a namespace descriptor is damaged"))?;
        Descriptor::new(fields)
    }

    /// Names and values, sorted by name.
    pub fn fields(&self) -> impl Iterator<Item = (&str, &str)> {
        self.fields.iter().map(|(name, value)| (name.as_str(), value.as_str()))
    }

    /// The value of a field; `None` if there is no such field.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.fields.get(name).map(String::as_str)
    }

    /// The tenant; empty if the descriptor names none.
    pub fn tenant(&self) -> &str {
        self.get(Descriptor::TENANT).unwrap_or("")
    }
}

impl fmt::Display for Descriptor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, (name, value)) in self.fields.iter().enumerate() {
            write!(f, "{}{name}={value}", if i == 0 { "" } else { " " })?;
        }
        Ok(())
    }
}

fn unescape(value: &str) -> Option<String> {
    let mut plain = String::with_capacity(value.len());
    let mut chars = value.chars();
    while let Some(c) = chars.next() {
        plain.push(match c {
            '\\' => match chars.next()? {
                '\\' => '\\',
                'n' => '\n',
                _ => return None,
            },
            c => c,
        });
    }
    Some(plain)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn descriptor(fields: &[(&str, &str)]) -> Descriptor {
        Descriptor::new(fields.iter().map(|(n, v)| (n.to_string(), v.to_string()))).unwrap()
    }

    #[test]
    fn the_digest_is_fixed_for_ever() {
        // Blocks on disks and in shared stores are found by this number; it must never change.
        let id = descriptor(&[("model", "llama"), ("kv_dtype", "bf16")]).id();
        assert_eq!(id.to_string(), "79e825c728eacf50ec48b86c09526905");
    }

    #[test]
    fn a_descriptor_without_fields_or_with_a_long_value_is_refused_with_a_hint() {
        for fields in [Vec::new(), vec![("model".to_string(), "x".repeat(Descriptor::MAX_BYTES))]] {
            let error = Descriptor::new(fields).unwrap_err();
            assert!(
                error.hint_text().is_some_and(|hint| hint.contains("a digest in place of a long value")),
                "{error}"
            );
        }
    }

    #[test]
    fn fields_never_run_together() {
        let one = descriptor(&[("a", "bc"), ("d", "")]);
        for other in
            [descriptor(&[("ab", "c"), ("d", "")]), descriptor(&[("a", "b"), ("d", "c")]), descriptor(&[("a", "bc")])]
        {
            assert_ne!(one.id(), other.id(), "{one} and {other}");
        }
    }

    proptest! {
        #[test]
        fn text_reads_back(fields in proptest::collection::btree_map("[a-z_.]{1,8}", "[ -~\n\\\\]{0,20}", 1..6)) {
            let descriptor = Descriptor::new(fields).unwrap();
            prop_assert_eq!(Descriptor::from_text(&descriptor.to_text()).unwrap(), descriptor);
        }

        #[test]
        fn any_difference_is_another_namespace(
            a in proptest::collection::btree_map("[a-z]{1,3}", "[a-z=]{0,3}", 1..4),
            b in proptest::collection::btree_map("[a-z]{1,3}", "[a-z=]{0,3}", 1..4),
        ) {
            let (left, right) = (Descriptor::new(a.clone()).unwrap(), Descriptor::new(b.clone()).unwrap());
            prop_assert_eq!(a == b, left.id() == right.id());
        }
    }

    mod fuzz {
        use forebay_fuzz::Target;

        use super::*;

        #[test]
        fn whatever_text_a_pool_holds_it_is_one_descriptor_or_none() {
            let made = [descriptor(&[("model", "a=b"), ("tenant", "x\\\n")]), descriptor(&[("kv_dtype", "")])];
            let inputs = made.iter().map(|descriptor| descriptor.to_text().into_bytes()).collect();
            let words: [&[u8]; 5] = [b"=", b"\n", b"\\", b"\\n", b"tenant="];
            Target::new("descriptors", inputs).words(&words).cases(30_000).run(|bytes| {
                let text = String::from_utf8_lossy(bytes);
                let read = Descriptor::from_text(&text).map_err(|error| error.to_string().len())?;
                let again = Descriptor::from_text(&read.to_text()).expect("what was written is read");
                assert_eq!((again.id(), &again), (read.id(), &read));
                Ok::<_, usize>((read.fields().count(), read.tenant().is_empty()))
            });
        }
    }
}
