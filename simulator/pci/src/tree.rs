//! The files of the tree, and the kernel's reactions to them.

use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Duration;

use rustix::fs::{CWD, FileType, Mode};

/// How often NVIDIA's driver checks whether the last program has closed the GPU.
const REMOVAL_PAUSE: Duration = Duration::from_millis(50);

const DRIVERS: [&str; 4] = ["nvidia", "pcieport", "snd_hda_intel", "vfio-pci"];

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Function {
    /// Its address, as sysfs writes it: `0000:1b:00.0`.
    pub address: String,
    /// The vendor's id, such as 0x10de for NVIDIA.
    pub vendor: u16,
    pub device: u16,
    /// The class, 24 bits: 0x030200 is a GPU without a display, 0x040300 its audio function.
    pub class: u32,
    /// Its IOMMU group; `None` if the machine has no IOMMU, or if it is switched off.
    pub group: Option<u32>,
}

/// The error that Linux returns for a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// `ENODEV`: no such device, not bound to this driver, or not a device of this driver.
    NoDevice,
    /// `EBUSY`: bound already.
    Busy,
    /// `EINVAL`: VFIO takes no bridge, and no device without an IOMMU group.
    Invalid,
}

/// The kind of the files below `dev`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Nodes {
    /// Regular files, which any program can open.
    Files,
    /// Character devices, which containers can be given. Opening them fails: there is no driver.
    Devices,
}

/// The PCI functions under a root folder.
#[derive(Debug)]
pub struct Tree {
    root: PathBuf,
    nodes: Nodes,
    addresses: Vec<String>,
    /// Locked while a device changes its driver.
    change: Mutex<()>,
}

impl Tree {
    /// Lays out the files, with each function bound to its driver as at boot. Removes what an earlier tree left.
    pub fn boot(root: &Path, nodes: Nodes, functions: &[Function]) -> io::Result<Self> {
        for old in [
            "sys/bus/pci",
            "sys/devices/pci0000:00",
            "sys/kernel/iommu_groups",
            "dev/vfio",
        ] {
            match fs::remove_dir_all(root.join(old)) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
                _ => {}
            }
        }
        let tree = Self {
            root: root.to_owned(),
            nodes,
            addresses: functions.iter().map(|f| f.address.clone()).collect(),
            change: Mutex::new(()),
        };
        let bus = root.join("sys/bus/pci");
        fs::create_dir_all(bus.join("devices"))?;
        fs::create_dir_all(root.join("sys/kernel/iommu_groups"))?;
        fs::create_dir_all(root.join("dev/vfio/devices"))?;
        for driver in DRIVERS {
            let folder = bus.join("drivers").join(driver);
            fs::create_dir_all(&folder)?;
            fifo(&folder.join("bind"))?;
            fifo(&folder.join("unbind"))?;
        }
        fifo(&bus.join("drivers_probe"))?;
        tree.node("vfio/vfio", (10, 196))?;
        tree.node("iommu", (10, 125))?;
        for function in functions {
            tree.add(function)?;
            // A function without a driver stays unbound.
            let _ = tree.probe(&function.address)?;
        }
        Ok(tree)
    }

    fn add(&self, function: &Function) -> io::Result<()> {
        let address = &function.address;
        let folder = self.root.join("sys/devices/pci0000:00").join(address);
        fs::create_dir_all(&folder)?;
        fs::write(folder.join("vendor"), format!("{:#06x}\n", function.vendor))?;
        fs::write(folder.join("device"), format!("{:#06x}\n", function.device))?;
        fs::write(folder.join("class"), format!("{:#08x}\n", function.class))?;
        fs::write(folder.join("driver_override"), "(null)\n")?;
        fs::write(folder.join("reset_method"), "flr bus\n")?;
        if let Some(group) = function.group {
            let devices = format!("sys/kernel/iommu_groups/{group}/devices");
            fs::create_dir_all(self.root.join(&devices))?;
            symlink(
                format!("../../../../devices/pci0000:00/{address}"),
                self.root.join(devices).join(address),
            )?;
            symlink(
                format!("../../../kernel/iommu_groups/{group}"),
                folder.join("iommu_group"),
            )?;
        }
        symlink(
            format!("../../../devices/pci0000:00/{address}"),
            self.device(address),
        )
    }

    fn node(&self, name: &str, (major, minor): (u32, u32)) -> io::Result<()> {
        let path = self.root.join("dev").join(name);
        if self.nodes == Nodes::Files {
            return fs::write(path, "");
        }
        let device = rustix::fs::makedev(major, minor);
        let mode = Mode::from_raw_mode(0o600);
        match rustix::fs::mknodat(CWD, &path, FileType::CharacterDevice, mode, device) {
            Ok(()) | Err(rustix::io::Errno::EXIST) => Ok(()),
            Err(e) => Err(e.into()),
        }
    }

    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The drivers that are loaded.
    #[must_use]
    pub fn drivers(&self) -> &'static [&'static str] {
        &DRIVERS
    }

    fn device(&self, address: &str) -> PathBuf {
        self.root.join("sys/bus/pci/devices").join(address)
    }

    fn is_there(&self, address: &str) -> bool {
        self.addresses.iter().any(|known| known == address)
    }

    /// The driver to which a function is bound.
    #[must_use]
    pub fn driver_of(&self, address: &str) -> Option<String> {
        name_of_link(&self.device(address).join("driver"))
    }

    fn attribute(&self, address: &str, name: &str) -> io::Result<String> {
        Ok(fs::read_to_string(self.device(address).join(name))?
            .trim()
            .to_owned())
    }

    /// Whether a driver takes a function: the one that `driver_override` names and no other, or one that knows its ids.
    fn matches(&self, driver: &str, address: &str) -> io::Result<bool> {
        let wanted = self.attribute(address, "driver_override")?;
        if !wanted.is_empty() && wanted != "(null)" {
            return Ok(wanted == driver);
        }
        let class = self.attribute(address, "class")?;
        let is_nvidia = self.attribute(address, "vendor")? == "0x10de";
        Ok(match driver {
            "nvidia" => is_nvidia && class.starts_with("0x03"),
            "snd_hda_intel" => class.starts_with("0x0403"),
            "pcieport" => class.starts_with("0x0604"),
            // vfio-pci has no ids of its own.
            _ => false,
        })
    }

    /// A write to the `bind` file of a driver.
    pub fn bind(&self, driver: &str, address: &str) -> io::Result<Result<(), Refusal>> {
        let _change = self.change.lock();
        if !self.is_there(address) || !self.matches(driver, address)? {
            return Ok(Err(Refusal::NoDevice));
        }
        if self.driver_of(address).is_some() {
            return Ok(Err(Refusal::Busy));
        }
        self.attach(driver, address)
    }

    /// A write to `drivers_probe`: the first driver that takes the function, if it is bound to none.
    pub fn probe(&self, address: &str) -> io::Result<Result<(), Refusal>> {
        let _change = self.change.lock();
        if !self.is_there(address) {
            return Ok(Err(Refusal::NoDevice));
        }
        if self.driver_of(address).is_some() {
            return Ok(Ok(()));
        }
        for driver in DRIVERS {
            if self.matches(driver, address)? {
                return self.attach(driver, address);
            }
        }
        Ok(Ok(()))
    }

    fn attach(&self, driver: &str, address: &str) -> io::Result<Result<(), Refusal>> {
        let device = self.device(address);
        if driver == "vfio-pci" {
            let is_bridge = self.attribute(address, "class")?.starts_with("0x0604");
            let Some(group) = name_of_link(&device.join("iommu_group")).filter(|_| !is_bridge)
            else {
                return Ok(Err(Refusal::Invalid));
            };
            let devices = self.root.join("dev/vfio/devices");
            let number = (0..=u16::MAX)
                .find(|n| !devices.join(format!("vfio{n}")).exists())
                .unwrap_or_default();
            fs::create_dir_all(device.join(format!("vfio-dev/vfio{number}")))?;
            self.node(&format!("vfio/devices/vfio{number}"), (510, number.into()))?;
            let minor = group.parse().unwrap_or_default();
            self.node(&format!("vfio/{group}"), (511, minor))?;
        }
        let folder = self.root.join("sys/bus/pci/drivers").join(driver);
        symlink(
            format!("../../../../devices/pci0000:00/{address}"),
            folder.join(address),
        )?;
        symlink(
            format!("../../../bus/pci/drivers/{driver}"),
            device.join("driver"),
        )?;
        Ok(Ok(()))
    }

    /// A write to the `unbind` file of a driver. It waits while `in_use` returns true: NVIDIA's driver releases a GPU only
    /// after the last program has closed it.
    pub fn unbind(
        &self,
        driver: &str,
        address: &str,
        in_use: &dyn Fn(&str) -> bool,
    ) -> io::Result<Result<(), Refusal>> {
        let _change = self.change.lock();
        if !self.is_there(address) || self.driver_of(address).as_deref() != Some(driver) {
            return Ok(Err(Refusal::NoDevice));
        }
        while in_use(address) {
            std::thread::sleep(REMOVAL_PAUSE);
        }
        let device = self.device(address);
        fs::remove_file(device.join("driver"))?;
        fs::remove_file(
            self.root
                .join("sys/bus/pci/drivers")
                .join(driver)
                .join(address),
        )?;
        if driver == "vfio-pci" {
            self.remove_vfio_nodes(&device)?;
        }
        Ok(Ok(()))
    }

    fn remove_vfio_nodes(&self, device: &Path) -> io::Result<()> {
        for entry in fs::read_dir(device.join("vfio-dev"))? {
            fs::remove_file(self.root.join("dev/vfio/devices").join(entry?.file_name()))?;
        }
        fs::remove_dir_all(device.join("vfio-dev"))?;
        let Some(group) = name_of_link(&device.join("iommu_group")) else {
            return Ok(());
        };
        let members = self
            .root
            .join(format!("sys/kernel/iommu_groups/{group}/devices"));
        for member in fs::read_dir(members)? {
            let address = member?.file_name().to_string_lossy().into_owned();
            if self.driver_of(&address).as_deref() == Some("vfio-pci") {
                return Ok(());
            }
        }
        fs::remove_file(self.root.join("dev/vfio").join(group))
    }
}

fn name_of_link(link: &Path) -> Option<String> {
    let target = fs::read_link(link).ok()?;
    Some(target.file_name()?.to_str()?.to_owned())
}

fn fifo(path: &Path) -> io::Result<()> {
    rustix::fs::mknodat(CWD, path, FileType::Fifo, Mode::from_raw_mode(0o600), 0)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const GPU: &str = "0000:41:00.0";
    const AUDIO: &str = "0000:41:00.1";
    const BRIDGE: &str = "0000:40:00.0";

    fn function(address: &str, class: u32, group: Option<u32>) -> Function {
        Function {
            address: address.to_owned(),
            vendor: 0x10de,
            device: 0x2330,
            class,
            group,
        }
    }

    fn tree(group: Option<u32>) -> (tempfile::TempDir, Tree) {
        let root = tempfile::tempdir().unwrap();
        let functions = [
            function(GPU, 0x03_0200, group),
            function(AUDIO, 0x04_0300, group),
            function(BRIDGE, 0x06_0400, group),
        ];
        let tree = Tree::boot(root.path(), Nodes::Files, &functions).unwrap();
        (root, tree)
    }

    fn overrides(tree: &Tree, address: &str, driver: &str) {
        fs::write(
            tree.device(address).join("driver_override"),
            format!("{driver}\n"),
        )
        .unwrap();
    }

    fn free(_: &str) -> bool {
        false
    }

    #[test]
    fn a_boot_binds_each_function_to_its_driver() {
        let (_root, tree) = tree(Some(7));
        assert_eq!(tree.driver_of(GPU).as_deref(), Some("nvidia"));
        assert_eq!(tree.driver_of(AUDIO).as_deref(), Some("snd_hda_intel"));
        assert_eq!(tree.driver_of(BRIDGE).as_deref(), Some("pcieport"));
        let read = |name| fs::read_to_string(tree.device(GPU).join(name)).unwrap();
        assert_eq!(read("vendor"), "0x10de\n");
        assert_eq!(read("class"), "0x030200\n");
        assert_eq!(read("driver_override"), "(null)\n");
        let group = fs::canonicalize(tree.device(GPU).join("iommu_group")).unwrap();
        assert!(group.join("devices").join(AUDIO).join("vendor").exists());
    }

    #[test]
    fn only_an_unbound_function_is_bound_and_only_to_its_override() {
        let (_root, tree) = tree(Some(7));
        assert_eq!(tree.bind("nvidia", GPU).unwrap(), Err(Refusal::Busy));
        assert_eq!(tree.bind("vfio-pci", GPU).unwrap(), Err(Refusal::NoDevice));
        assert_eq!(
            tree.unbind("vfio-pci", GPU, &free).unwrap(),
            Err(Refusal::NoDevice)
        );
        assert_eq!(tree.unbind("nvidia", GPU, &free).unwrap(), Ok(()));
        overrides(&tree, GPU, "vfio-pci");
        assert_eq!(tree.bind("nvidia", GPU).unwrap(), Err(Refusal::NoDevice));
        assert_eq!(tree.probe(GPU).unwrap(), Ok(()));
        assert_eq!(tree.driver_of(GPU).as_deref(), Some("vfio-pci"));
        assert_eq!(tree.probe("0000:99:00.0").unwrap(), Err(Refusal::NoDevice));
        assert_eq!(tree.probe("../../etc").unwrap(), Err(Refusal::NoDevice));
    }

    #[test]
    fn vfio_nodes_exist_while_a_function_of_the_group_is_bound() {
        let (root, tree) = tree(Some(7));
        let at = |path: &str| root.path().join("dev/vfio").join(path).exists();
        for address in [GPU, AUDIO] {
            let driver = tree.driver_of(address).unwrap();
            tree.unbind(&driver, address, &free).unwrap().unwrap();
            overrides(&tree, address, "vfio-pci");
            tree.bind("vfio-pci", address).unwrap().unwrap();
        }
        assert!(at("7") && at("devices/vfio0") && at("devices/vfio1"));
        assert!(tree.device(AUDIO).join("vfio-dev/vfio1").exists());
        tree.unbind("vfio-pci", GPU, &free).unwrap().unwrap();
        assert!(at("7") && !at("devices/vfio0") && at("devices/vfio1"));
        tree.unbind("vfio-pci", AUDIO, &free).unwrap().unwrap();
        assert!(!at("7") && !at("devices/vfio1"));
        overrides(&tree, GPU, "");
        tree.probe(GPU).unwrap().unwrap();
        assert_eq!(tree.driver_of(GPU).as_deref(), Some("nvidia"));
    }

    #[test]
    fn vfio_refuses_bridges_and_functions_without_an_iommu_group() {
        for (address, group) in [(BRIDGE, Some(7)), (GPU, None)] {
            let (_root, tree) = tree(group);
            let driver = tree.driver_of(address).unwrap();
            tree.unbind(&driver, address, &free).unwrap().unwrap();
            overrides(&tree, address, "vfio-pci");
            assert_eq!(
                tree.bind("vfio-pci", address).unwrap(),
                Err(Refusal::Invalid)
            );
            assert_eq!(tree.driver_of(address), None);
        }
    }

    #[test]
    fn an_unbind_waits_for_the_last_program() {
        let (_root, tree) = tree(Some(7));
        let asked = std::cell::Cell::new(0);
        let in_use = |_: &str| {
            asked.set(asked.get() + 1);
            assert_eq!(tree.driver_of(GPU).as_deref(), Some("nvidia"));
            asked.get() < 3
        };
        assert_eq!(tree.unbind("nvidia", GPU, &in_use).unwrap(), Ok(()));
        assert_eq!(asked.get(), 3);
    }
}
