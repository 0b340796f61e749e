//! Removes all blocks of namespaces from a bucket: it lists the names that begin with a namespace, and removes those
//! of blocks.
//!
//! It makes one request per object, several at a time: many stores that are not Amazon's cannot remove in bulk. A
//! runtime in the caller's thread makes the requests, each with the tier's timeout.

use std::time::Instant;

use forebay_core::{BlockHash, BlockKey, Error, ErrorKind, NamespaceId, Result};
use futures_util::{StreamExt, TryStreamExt};
use object_store::aws::AmazonS3;
use object_store::path::Path;
use object_store::{Error as StoreError, ObjectStore, ObjectStoreExt};

use super::config::ObjectConfig;
use super::moves::path_of;
use super::tier::patient_store;
use crate::purge::{Place, Purging};

/// Objects removed in one step.
const OBJECTS_AT_ONCE: usize = 64;
/// Requests in flight: a quarter of the tier's default.
const REQUESTS: usize = 8;

pub(super) fn place(config: &ObjectConfig, name: String) -> Place {
    let config = config.clone();
    // Each removal of a step may be repeated for a whole timeout; the last attempt may take another, after a pause.
    let patience = 3 * config.timeout * (OBJECTS_AT_ONCE / REQUESTS) as u32;
    let empty = move |purging: &Purging| {
        if config.read_only {
            let error = Error::new(ErrorKind::Unsupported, "the bucket is used read-only");
            return Err(error.hint("purge on a host that may write to it"));
        }
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(|error| {
            Error::new(ErrorKind::Unavailable, "cannot start requests").source(error).hint("purge again")
        })?;
        // The tier's client cannot be used: its connections belong to the tier's runtime. This one's end with this
        // call.
        let store = patient_store(&config)?;
        purging.namespaces().try_for_each(|id| runtime.block_on(empty(&store, &config.prefix, id, purging)))
    };
    Place { name, patience, empty: Box::new(empty), is_mount: false }
}

async fn empty(store: &AmazonS3, prefix: &str, id: NamespaceId, purging: &Purging) -> Result<()> {
    let folder = if prefix.is_empty() { Path::from(id.to_string()) } else { Path::from(format!("{prefix}/{id}")) };
    let names = store.list(Some(&folder)).map_ok(|about| about.location);
    let ours = names.try_filter(|path| std::future::ready(is_of(path, prefix, id)));
    let mut steps = ours.try_chunks(OBJECTS_AT_ONCE);
    let mut begun = Instant::now();
    while let Some(step) = steps.next().await {
        let step = step.map_err(|error| failed("list", error.1))?;
        let removals = futures_util::stream::iter(step).map(Ok);
        let removed = removals.try_for_each_concurrent(REQUESTS, |path| async move {
            store.delete(&path).await.or_else(|error| match error {
                StoreError::NotFound { .. } => Ok(()),
                error => Err(error),
            })?;
            purging.removed(1, 1);
            Ok(())
        });
        removed.await.map_err(|error| failed("remove", error))?;
        purging.rest(begun)?;
        begun = Instant::now();
    }
    purging.rest(begun)
}

/// Whether the path is exactly a block's name in the namespace.
fn is_of(path: &Path, prefix: &str, namespace: NamespaceId) -> bool {
    let key = || {
        let (group, hash) = path.filename()?.split_once('-')?;
        let group = u16::from_str_radix(group, 16).ok()?;
        Some(BlockKey { namespace, group, hash: BlockHash::from_hex(hash)? })
    };
    key().is_some_and(|key| path_of(&key, prefix) == *path)
}

fn failed(what: &str, error: StoreError) -> Error {
    Error::new(ErrorKind::Unavailable, format!("the object store cannot {what} objects"))
        .source(error)
        .hint("check the store and that the key may list and delete in the bucket, and purge again")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_blocks_of_the_namespace_are_taken() {
        let key = BlockKey { namespace: NamespaceId(0xAB), group: 0x1F, hash: BlockHash::new(&[1, 0xFE]).unwrap() };
        for prefix in ["", "team/cache"] {
            let path = path_of(&key, prefix);
            assert!(is_of(&path, prefix, NamespaceId(0xAB)) && !is_of(&path, prefix, NamespaceId(0xAC)));
            assert!(!is_of(&path, "other", NamespaceId(0xAB)));
            for other in ["001F-01fe", "1f-01fe", "001f-01f", "001f-01fe.old", "001f", "001f-01fe/x"] {
                let other = Path::from(path.to_string().replace("001f-01fe", other));
                assert!(!is_of(&other, prefix, NamespaceId(0xAB)), "{other}");
            }
        }
    }
}
