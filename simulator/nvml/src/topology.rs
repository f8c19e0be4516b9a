//! The places of GPUs: NUMA nodes, processors, and their distances.

use nvml_wrapper_sys::bindings::nvmlDevice_t;

use crate::code::Code;
use crate::export::{export, put};
use crate::state::device;

/// The processors of NUMA node `node`, as the kernel lists them.
fn processors(node: i32) -> Vec<usize> {
    let read = |path: String| std::fs::read_to_string(path).ok();
    let list = read(format!("/sys/devices/system/node/node{node}/cpulist"))
        .or_else(|| read("/sys/devices/system/cpu/online".to_owned()))
        .unwrap_or_default();
    list.trim()
        .split(',')
        .filter_map(|range| {
            let (from, to) = range.split_once('-').unwrap_or((range, range));
            Some(from.parse().ok()?..=to.parse().ok()?)
        })
        .flatten()
        .collect()
}

/// Writes bit `n` of an array of `length` words for each `n` in `bits`.
///
/// # Safety
/// `to` is null or valid for `length` words.
unsafe fn put_bits(to: *mut u64, length: u32, bits: &[usize]) -> Result<(), Code> {
    if to.is_null() || length == 0 {
        return Err(Code::INVALID_ARGUMENT);
    }
    let mut words = vec![0u64; length as usize];
    for bit in bits {
        if let Some(word) = words.get_mut(bit / 64) {
            *word |= 1 << (bit % 64);
        }
    }
    // SAFETY: `words` has the length that the caller gave.
    unsafe { to.copy_from_nonoverlapping(words.as_ptr(), words.len()) };
    Ok(())
}

fn node_bit(node: i32) -> Vec<usize> {
    usize::try_from(node).into_iter().collect()
}

export! {
    fn nvmlDeviceGetCpuAffinity(of: nvmlDevice_t, length: u32, set: *mut u64) {
        put_bits(set, length, &processors(device(of)?.state.numa_node))
    }
    fn nvmlDeviceGetCpuAffinityWithinScope(of: nvmlDevice_t, length: u32, set: *mut u64, _scope: u32) {
        put_bits(set, length, &processors(device(of)?.state.numa_node))
    }
    fn nvmlDeviceGetMemoryAffinity(of: nvmlDevice_t, length: u32, set: *mut u64, _scope: u32) {
        put_bits(set, length, &node_bit(device(of)?.state.numa_node))
    }
    fn nvmlDeviceGetTopologyCommonAncestor(first: nvmlDevice_t, second: nvmlDevice_t, level: *mut u32) {
        let (first, second) = (device(first)?, device(second)?);
        put(level, match () {
            () if first.gpu == second.gpu => 0,
            // Each GPU is behind its own root port. NVML_TOPOLOGY_NODE is 40, NVML_TOPOLOGY_SYSTEM 50.
            () if first.state.numa_node == second.state.numa_node => 40,
            () => 50,
        })
    }
    fn nvmlDeviceGetP2PStatus(first: nvmlDevice_t, second: nvmlDevice_t, _index: u32, status: *mut u32) {
        device(first)?;
        device(second)?;
        // NVML_P2P_STATUS_NOT_SUPPORTED
        put(status, 5)
    }
    fn nvmlDeviceGetNvLinkState(of: nvmlDevice_t, _link: u32, _active: *mut u32) {
        device(of)?;
        Err(Code::NOT_SUPPORTED)
    }
}
