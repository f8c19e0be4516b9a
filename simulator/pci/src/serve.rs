//! The daemon, which executes the writes to the tree's FIFOs.

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead as _, BufReader};
use std::path::Path;
use std::sync::Arc;

use crate::Tree;

/// Tells whether a program has a function's device open.
pub type InUse = Arc<dyn Fn(&str) -> bool + Send + Sync>;

/// Called after each change with the function's address and its new driver.
pub type Changed = Arc<dyn Fn(&str, Option<&str>) + Send + Sync>;

#[derive(Clone, Copy, Debug)]
enum Entry {
    Bind(&'static str),
    Unbind(&'static str),
    Probe,
}

/// Serves the tree from threads of this process; returns when all of them listen. Later writes are executed.
pub fn start(tree: &Arc<Tree>, in_use: &InUse, changed: &Changed) -> io::Result<()> {
    let bus = tree.root().join("sys/bus/pci");
    let mut files = vec![(bus.join("drivers_probe"), Entry::Probe)];
    for driver in tree.drivers() {
        let folder = bus.join("drivers").join(driver);
        files.push((folder.join("bind"), Entry::Bind(driver)));
        files.push((folder.join("unbind"), Entry::Unbind(driver)));
    }
    for (path, kind) in files {
        let fifo = open(&path)?;
        let (tree, in_use, changed) = (Arc::clone(tree), Arc::clone(in_use), Arc::clone(changed));
        std::thread::spawn(move || {
            for line in BufReader::new(fifo).lines() {
                let Ok(line) = line else { return };
                act(&tree, kind, line.trim(), &in_use, &changed);
            }
        });
    }
    Ok(())
}

/// Opened for writing too, so that it does not reach its end with its first writer.
fn open(fifo: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).open(fifo)
}

fn act(tree: &Tree, file: Entry, address: &str, in_use: &InUse, changed: &Changed) {
    let done = match file {
        Entry::Bind(driver) => tree.bind(driver, address),
        Entry::Unbind(driver) => tree.unbind(driver, address, &**in_use),
        Entry::Probe => tree.probe(address),
    };
    match done {
        Ok(Ok(())) => changed(address, tree.driver_of(address).as_deref()),
        Ok(Err(refusal)) => eprintln!("{address}: {file:?} is refused: {refusal:?}"),
        Err(error) => eprintln!("{address}: {file:?}: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;
    use crate::{Function, Nodes};

    #[test]
    fn writes_to_the_files_move_a_gpu_once_no_program_has_it_open() {
        const GPU: &str = "0000:41:00.0";
        let root = tempfile::tempdir().unwrap();
        let gpu = Function {
            address: GPU.parse().unwrap(),
            vendor: 0x10de,
            device: 0x2330,
            class: 0x03_0200,
            group: Some(7),
        };
        let tree = Arc::new(Tree::boot(root.path(), Nodes::Files, &[gpu]).unwrap());
        let is_open = Arc::new(AtomicBool::new(true));
        let (sender, changes) = mpsc::channel();
        let seen = Arc::clone(&is_open);
        start(
            &tree,
            &(Arc::new(move |_: &str| seen.load(Ordering::SeqCst)) as InUse),
            &(Arc::new(move |address: &str, driver: Option<&str>| {
                let _ = sender.send((address.to_owned(), driver.map(str::to_owned)));
            }) as Changed),
        )
        .unwrap();
        let bus = root.path().join("sys/bus/pci");
        let device = bus.join("devices").join(GPU);
        let next = || changes.recv_timeout(Duration::from_secs(10)).unwrap();
        std::fs::write(device.join("driver/unbind"), format!("{GPU}\n")).unwrap();
        assert!(changes.recv_timeout(Duration::from_millis(200)).is_err());
        assert_eq!(tree.driver_of(GPU).as_deref(), Some("nvidia"));
        is_open.store(false, Ordering::SeqCst);
        assert_eq!(next(), (GPU.to_owned(), None));
        std::fs::write(device.join("driver_override"), "vfio-pci\n").unwrap();
        std::fs::write(bus.join("drivers_probe"), format!("{GPU}\n")).unwrap();
        assert_eq!(next(), (GPU.to_owned(), Some("vfio-pci".to_owned())));
    }
}
