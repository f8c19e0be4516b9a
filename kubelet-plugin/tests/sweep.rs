//! The real program as the sweeper's child, on a page whose owner died.

use tranche_kubelet_plugin::share::sweep::RECLAIM;
use tranche_node::page::AccountFile;
use tranche_node::sweep::Sweeper;
use tranche_shim_core::{AccountPage, layout};

#[test]
fn the_plugin_reclaims_what_dead_processes_hold() {
    let mut page = AccountPage::initial().to_vec();
    // Slot 3 is marked, has 9 of the 9 used bytes, and has no owner.
    page[128] = 9;
    page[512] = 1 << 3;
    page[layout::HEADER_LEN + 3 * layout::SLOT_LEN + 16] = 9;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("account");
    std::fs::write(&path, page).unwrap();
    let sweeper = Sweeper::new(env!("CARGO_BIN_EXE_tranche-kubelet-plugin"), [RECLAIM]);
    assert_eq!(sweeper.sweep(&path).unwrap().dead, 1);
    assert_eq!(sweeper.sweep(&path).unwrap().dead, 0);
    let account = AccountFile::open(&path).unwrap();
    assert_eq!(account.copy().unwrap().snapshot().used(), 0);
}
