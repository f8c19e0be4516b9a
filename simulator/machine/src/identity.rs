//! Identities: UUIDs that are stable on a node and differ between nodes; and start times, which distinguish processes with
//! the same pid.

/// A node's identity: its machine id and its host name. Nodes cloned from one image may share the machine id, and host
/// names may repeat.
#[must_use]
pub fn node_identity(machine_id: &str, host_name: &str) -> Vec<u8> {
    format!("{}\n{}", machine_id.trim(), host_name.trim()).into_bytes()
}

/// The UUID of GPU `index` on the node: a hash in the form of a random UUID (version 4, variant 1), as drivers' UUIDs.
#[must_use]
pub fn gpu_uuid(node: &[u8], index: u32) -> [u8; 16] {
    let mut state: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    let mut feed = |byte: u8| {
        // FNV-1a over 128 bits: the values must differ and need not be secret.
        state ^= u128::from(byte);
        state = state.wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b);
    };
    node.iter().copied().for_each(&mut feed);
    index.to_le_bytes().into_iter().for_each(&mut feed);
    // The last bytes change the upper half only in later rounds.
    for round in 0..16 {
        feed(round);
    }
    let mut uuid = state.to_be_bytes();
    uuid[6] = (uuid[6] & 0x0f) | 0x40;
    uuid[8] = (uuid[8] & 0x3f) | 0x80;
    uuid
}

/// `GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx`, as NVML writes it.
#[must_use]
pub fn uuid_text(uuid: &[u8; 16]) -> String {
    with_prefix("GPU", uuid)
}

/// `MIG-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx`, as NVML writes it.
#[must_use]
pub fn mig_uuid_text(uuid: &[u8; 16]) -> String {
    with_prefix("MIG", uuid)
}

fn with_prefix(prefix: &str, uuid: &[u8; 16]) -> String {
    let word = |range: std::ops::Range<usize>| {
        uuid[range].iter().fold(String::new(), |mut text, byte| {
            use std::fmt::Write as _;
            let _ = write!(text, "{byte:02x}");
            text
        })
    };
    format!(
        "{prefix}-{}-{}-{}-{}-{}",
        word(0..4),
        word(4..6),
        word(6..8),
        word(8..10),
        word(10..16)
    )
}

/// The PID namespace of a process (`self`, or its pid), by inode.
#[must_use]
pub fn pid_namespace(process: &str) -> Option<u64> {
    let link = std::fs::read_link(format!("/proc/{process}/ns/pid")).ok()?;
    let text = link.to_str()?;
    text.strip_prefix("pid:[")?.strip_suffix(']')?.parse().ok()
}

/// The pid that process `pid` has in its own namespace.
#[must_use]
pub fn inner_pid(pid: i32) -> Option<i32> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let pids = status
        .lines()
        .find_map(|line| line.strip_prefix("NSpid:"))?;
    pids.split_whitespace().last()?.parse().ok()
}

/// When process `pid` started, in clock ticks since boot; `None` if it has ended.
#[must_use]
pub fn start_time(pid: i32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name, in parentheses, may contain any character, so only the fields after it are counted.
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
    if matches!(fields.next()?, "Z" | "X") {
        return None;
    }
    fields.nth(18)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn uuids_are_stable_on_a_node_and_differ_between_nodes() {
        let mut seen = BTreeSet::new();
        for node in 0..50 {
            let node = node_identity("d3adbeef", &format!("worker-{node}"));
            for index in 0..16 {
                assert_eq!(gpu_uuid(&node, index), gpu_uuid(&node, index));
                assert!(seen.insert(gpu_uuid(&node, index)[..8].to_vec()));
            }
        }
    }

    #[test]
    fn a_process_has_one_start_time() {
        let pid = i32::try_from(std::process::id()).unwrap();
        assert!(start_time(pid).unwrap() > 0);
        assert_eq!(start_time(pid), start_time(pid));
        assert_eq!(start_time(-1), None);
    }

    #[test]
    fn a_process_knows_its_namespace() {
        let pid = i32::try_from(std::process::id()).unwrap();
        assert!(pid_namespace("self").is_some());
        assert_eq!(pid_namespace("self"), pid_namespace(&pid.to_string()));
        assert!(inner_pid(pid).is_some());
        assert_eq!((pid_namespace("0"), inner_pid(-1)), (None, None));
    }

    #[test]
    fn a_uuid_has_the_form_of_a_random_one() {
        let text = uuid_text(&gpu_uuid(b"node", 3));
        assert_eq!(text.len(), 40);
        assert!(text.starts_with("GPU-"));
        assert_eq!(&text[18..19], "4");
        assert!("89ab".contains(&text[23..24]));
    }
}
