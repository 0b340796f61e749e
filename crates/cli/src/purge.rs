//! `forebay purge`: drops blocks at once, without asking.

use forebay_core::Error;
use forebay_rpc::proto::{PurgeReply, PurgeRequest};
use serde_json::json;

use crate::arguments::{Purge, What};
use crate::client;
use crate::failure::Failure;
use crate::output::{print, print_json, size};
use crate::serve::runtime;

pub fn run(arguments: &Purge) -> Result<(), Failure> {
    let request = request(&arguments.what).map_err(Failure::Usage)?;
    let mut client = client::connect(&arguments.daemon.socket_directory()?);
    let PurgeReply { purged_blocks, purged_bytes, held_blocks } = runtime()?.block_on(client.purge(request))?;
    if arguments.json {
        print_json(&json!({"purged_blocks": purged_blocks, "purged_bytes": purged_bytes, "held_blocks": held_blocks}));
    } else {
        print(&format!("purged {purged_blocks} blocks, {}\n", size(purged_bytes)));
        if held_blocks > 0 {
            print(&format!(
                "{held_blocks} more are held by engines: they can no longer be hit, and go when released\n"
            ));
        }
    }
    Ok(())
}

fn request(what: &What) -> Result<PurgeRequest, Error> {
    if let Some(namespace) = &what.namespace {
        return Ok(PurgeRequest { namespace_id: namespace_id(namespace)?, ..PurgeRequest::default() });
    }
    let tenant = what.tenant.clone().unwrap_or_default();
    Ok(PurgeRequest { all_tenants_named_empty: tenant.is_empty(), tenant, ..PurgeRequest::default() })
}

/// 32 hexadecimal digits, most significant first.
fn namespace_id(text: &str) -> Result<Vec<u8>, Error> {
    let is_hex = text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    match u128::from_str_radix(text, 16) {
        Ok(id) if is_hex => Ok(id.to_be_bytes().to_vec()),
        _ => Err(Error::invalid(format!("`{text}` is no namespace id")).hint("`forebay inspect` lists the ids")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_taken_whole_or_not_at_all() {
        let id = namespace_id("00ff000000000000000000000000000a").unwrap();
        assert_eq!((id.len(), id[1], id[15]), (16, 0xff, 10));
        for bad in [
            "",
            "0a",
            "00ff000000000000000000000000000a0",
            "+0ff000000000000000000000000000a",
            "00ff00000000000000000000000000zz",
        ] {
            assert!(namespace_id(bad).is_err(), "{bad:?} was taken");
        }
    }

    #[test]
    fn only_an_empty_tenant_that_was_asked_for_means_those_without_one() {
        let of = |tenant: &str| request(&What { namespace: None, tenant: Some(tenant.to_string()) }).unwrap();
        assert!(of("").all_tenants_named_empty);
        assert!(!of("a").all_tenants_named_empty);
    }
}
