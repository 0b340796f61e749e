//! Where a pool lies, and on which pages, on whatever machine the tests run.

use forebay_numa::Linux;

use super::*;
use crate::pool::map::{Access, Region, address_range};
use crate::pool::mounts::mount_of;

fn auto(directory: &Path, capacity_bytes: u64) -> PoolConfig {
    PoolConfig { directory: directory.to_owned(), capacity_bytes, unit_bytes: None, huge_pages: HugePages::Auto }
}

fn populate(pool: &Pool) {
    (0..pool.geometry().units).for_each(|unit| pool.populate_unit(unit).unwrap());
}

#[test]
fn a_pool_lies_on_huge_pages_entirely_or_says_why_not_and_stays_there_after_a_restart() {
    let home = Home::new();
    let config = auto(home.path(), 64 * MIB);
    let opened = Pool::open(&config).unwrap();
    assert_eq!(opened.pool.huge_page_report().unwrap().mapped_bytes, 0);
    populate(&opened.pool);
    let report = opened.pool.huge_page_report().unwrap();
    println!("{report:?}");
    assert_eq!(report.mapped_bytes, 64 * MIB);
    let tried = match report.backing {
        Backing::Hugetlbfs => 0,
        Backing::Advised => report.notes.len().min(2),
        Backing::Collapsed => 3,
        Backing::Small => 4,
    };
    assert_eq!(report.notes.len(), tried, "each better place has a reason: {:?}", report.notes);
    assert_eq!(report.huge_bytes, if report.backing.is_huge() { 64 * MIB } else { 0 });
    let extent = Extent { first_unit: 2, units: 1, slot_bytes: 4096 };
    opened.pool.set_extent(&extent).unwrap();
    let slot = opened.pool.geometry().slot(&extent, 100);
    store(&opened.pool, slot, 1, 1);
    drop(opened);

    let opened = Pool::open(&config).unwrap();
    assert_eq!(opened.outcome, Outcome::Recovered { previous_epoch: 1, grown_by_units: 0 });
    populate(&opened.pool);
    assert_eq!(block_in(&opened.pool, &recovered(&opened.pool)[100]), Some(block(1).0));
    let again = opened.pool.huge_page_report().unwrap();
    assert_eq!((again.backing, again.mapped_bytes, again.huge_bytes), (report.backing, 64 * MIB, report.huge_bytes));
    drop(opened);
    remove(home.path()).unwrap();
    assert_eq!(files_in(home.path()), [] as [PathBuf; 0]);
}

#[test]
fn pages_joined_by_collapsing_keep_what_they_hold() {
    let home = Home::new();
    let pool = home.pool(4 * MIB);
    let file = home.file("data");
    let before: Vec<u8> = (0..4 * MIB).map(|i| ((i * 2_654_435_761) >> 9) as u8).collect();
    // The second half of the file is a hole.
    file.write_all_at(&before[..3 << 20], 0).unwrap();
    let region = map::Region::map(&file, 0, 4 * MIB, map::Access::ReadWrite).unwrap();
    region.want_huge_pages();
    huge::populate(&region, 0..region.len(), Backing::Collapsed).unwrap();
    let (mapped, huge) = huge::mapped_and_huge_bytes(&region).unwrap();
    println!("{huge} of {mapped} bytes were joined");
    assert_eq!(mapped, 4 * MIB);
    let mut after = vec![1; 4 << 20];
    pool.read(0, &mut after);
    assert!(after[..3 << 20] == before[..3 << 20] && after[3 << 20..].iter().all(|byte| *byte == 0));
}

#[test]
fn a_pool_that_must_have_huge_pages_gets_them_or_is_refused_with_every_reason() {
    let home = Home::new();
    let config = PoolConfig { huge_pages: HugePages::Require, ..auto(home.path(), 8 * MIB) };
    match Pool::open(&config) {
        Ok(opened) => {
            populate(&opened.pool);
            let report = opened.pool.huge_page_report().unwrap();
            assert_eq!((report.mapped_bytes, report.huge_bytes), (8 * MIB, 8 * MIB));
        }
        Err(error) => {
            assert_eq!(error.to_string().matches("; ").count(), 3, "{error}");
            assert!(error.hint_text().unwrap().contains("sysctl vm.nr_hugepages=4"), "{error}");
        }
    }
}

#[test]
fn a_pool_on_small_pages_is_replaced_when_huge_ones_become_required() {
    let home = Home::new();
    assert_eq!(home.open(8 * MIB).outcome, Outcome::Created);
    match Pool::open(&PoolConfig { huge_pages: HugePages::Require, ..home.config(8 * MIB) }) {
        Ok(opened) => {
            assert!(matches!(&opened.outcome, Outcome::Replaced { reason } if reason.contains("small pages")))
        }
        Err(_) => assert!(matches!(home.open(8 * MIB).outcome, Outcome::Recovered { .. }), "nothing was lost"),
    }
}

#[test]
fn a_pool_whose_directory_is_on_a_disk_lies_in_memory_all_the_same_or_is_refused() {
    let _turn = with_others();
    let directory = tempfile::tempdir().unwrap();
    let is_memory = mount_of(directory.path()).unwrap().filesystem == "tmpfs";
    let config = PoolConfig { huge_pages: HugePages::Off, ..auto(directory.path(), 4 * MIB) };
    match Pool::open(&config) {
        Ok(opened) => {
            populate(&opened.pool);
            drop(opened);
            let home = if is_memory { directory.path().to_owned() } else { directory.path().join("mnt") };
            assert_eq!(mount_of(&home.join("data")).unwrap().filesystem, "tmpfs");
            assert!(matches!(Pool::open(&config).unwrap().outcome, Outcome::Recovered { .. }));
            remove(directory.path()).unwrap();
        }
        Err(error) => {
            assert!(!is_memory && error.to_string().contains("not in memory"), "{error}");
            assert!(error.hint_text().unwrap().contains("/dev/shm"), "{error}");
        }
    }
    assert_eq!(files_in(directory.path()), [] as [PathBuf; 0]);
}

#[test]
fn memory_is_preferred_on_a_node_for_whoever_touches_it_and_keeps_what_it_holds() {
    let file = tempfile::tempfile_in("/dev/shm").unwrap();
    file.set_len(4 * MIB).unwrap();
    let region = Region::map(&file, 0, 4 * MIB, Access::ReadWrite).unwrap();
    region.write(0, &[7; 4096]);
    let (whole, half) = (4 * MIB as usize, 2 * MIB as usize);
    for range in [0..half, half..whole] {
        if let Err(error) = region.prefer(range, 0, &Linux) {
            // The rules of a container may forbid it, which is no error of ours.
            assert!([libc::EPERM, libc::ENOSYS].map(Some).contains(&error.raw_os_error()), "{error}");
            return;
        }
    }
    region.populate(0..whole).unwrap();
    let maps = std::fs::read_to_string("/proc/self/numa_maps").unwrap();
    let start = format!("{:x} ", address_range(&region).start);
    let told = maps.lines().find(|line| line.starts_with(&start)).expect("the file is mapped");
    assert!(told.contains(" prefer") && told.contains(":0 "), "{told}");
    assert_eq!(huge::node_bytes(&region).unwrap(), [(0, 4 * MIB)]);
    let mut found = [0; 4096];
    region.read(0, &mut found);
    assert_eq!(found, [7; 4096]);
    let error = region.prefer(0..half, 1 << 20, &Linux).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EINVAL), "no kernel has so many nodes");
}
