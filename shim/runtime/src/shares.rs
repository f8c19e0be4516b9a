//! The container's shares: which GPUs it may use, and how much of each.
//!
//! Read from [`paths::SHARES`], never from the environment. Everything that is not exactly as the
//! node writes it is an error, and an error means that no GPU is used: see [`Trouble`].

use core::ffi::CStr;
use core::fmt;

use tranche_shim_core::layout;
use tranche_shim_core::paths::{self, MAX_SHARES};
use tranche_shim_core::{AccountPage, CapPage, GpuUuid, PageError, cap};

use crate::sys::{Errno, File};

/// One share.
#[derive(Clone, Copy, Debug)]
pub struct Share {
    /// The GPU it lies on.
    pub gpu: GpuUuid,
    /// Bytes of device memory it may hold; `None` for a GPU without a cap.
    pub limit: Option<u64>,
    name: Name,
}

/// The name of a share's folder.
#[derive(Clone, Copy)]
pub struct Name([u8; NAME]);

/// A name and its zero: what a file system allows.
const NAME: usize = 256;

/// The shares of this container.
#[derive(Debug)]
pub struct Shares {
    list: [Option<Share>; MAX_SHARES],
}

/// Why this container's shares cannot be used. Its text is for the person who sees the program fail.
#[derive(Clone, Copy, Debug)]
pub enum Trouble {
    /// The folder of the shares cannot be read.
    Folder(Errno),
    /// There is no share.
    NoShares,
    /// There are more shares than this build can hold.
    TooManyShares,
    /// A file of a share cannot be opened, read or mapped.
    File(Name, &'static str, Errno),
    /// A cap page that the container could have written itself.
    Writable(Name),
    /// A page with the wrong content.
    Page(Name, &'static str, PageError),
    /// A GPU is visible that no share is for.
    NoShareOf(GpuUuid),
    /// Every slot of a share belongs to a living process.
    Full(Name),
    /// No memory for the shim's own tables.
    Memory(Errno),
}

const REMEDY: &str = "the GPU is not used; recreate the pod, and if it persists see the log of tranche-kubelet-plugin on its node";

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shares = paths::SHARES;
        match *self {
            Self::Folder(Errno(errno)) => {
                write!(
                    f,
                    "{shares}: cannot be read (errno {errno}): this container has no share of a GPU; "
                )
            }
            Self::NoShares => write!(f, "{shares}: empty: this container has no share of a GPU; "),
            Self::TooManyShares => write!(f, "{shares}: more than {MAX_SHARES} shares; "),
            Self::File(name, file, Errno(errno)) => {
                write!(
                    f,
                    "{shares}/{name}/{file}: cannot be read (errno {errno}); "
                )
            }
            Self::Writable(name) => {
                write!(
                    f,
                    "{shares}/{name}/cap: must be on a read-only mount of a tmpfs; "
                )
            }
            Self::Page(name, file, ref error) => write!(f, "{shares}/{name}/{file}: {error}; "),
            Self::NoShareOf(gpu) => write!(
                f,
                "{gpu}: visible here, but no page in {shares} is for it; "
            ),
            Self::Full(name) => write!(
                f,
                "{shares}/{name}: {} processes use this share already; ",
                layout::SLOTS
            ),
            Self::Memory(Errno(errno)) => write!(
                f,
                "no address space for the share's tables (errno {errno}; Linux 4.14 or newer is needed); "
            ),
        }?;
        f.write_str(REMEDY)
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.0.split(|&byte| byte == 0).next().unwrap_or(&[]);
        f.write_str(core::str::from_utf8(name).unwrap_or("?"))
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Shares {
    /// Reads all shares' cap pages.
    pub fn read() -> Result<Self, Trouble> {
        let mut shares = Self {
            list: [None; MAX_SHARES],
        };
        let mut count = 0;
        let folder =
            File::open(Path::new().part(paths::SHARES).end(), false).map_err(Trouble::Folder)?;
        folder
            .names(|name| {
                let share = Share::read(Name::new(name))?;
                *shares.list.get_mut(count).ok_or(Trouble::TooManyShares)? = Some(share);
                count += 1;
                Ok(())
            })
            .map_err(Trouble::Folder)??;
        if count == 0 {
            Err(Trouble::NoShares)
        } else {
            Ok(shares)
        }
    }

    /// The shares of one GPU.
    pub fn of(&self, gpu: GpuUuid) -> impl Iterator<Item = Share> + '_ {
        self.list
            .iter()
            .flatten()
            .filter(move |share| share.gpu == gpu)
            .copied()
    }
}

impl Share {
    fn read(name: Name) -> Result<Self, Trouble> {
        let trouble = |errno| Trouble::File(name, paths::CAP, errno);
        let file = File::open(name.file(paths::CAP).end(), false).map_err(trouble)?;
        if !file.is_on_read_only_tmpfs().map_err(trouble)? {
            return Err(Trouble::Writable(name));
        }
        let mut page = [0; cap::LEN];
        let (len, read) = (
            file.len().map_err(trouble)?,
            file.read_at(&mut page, 0).map_err(trouble)?,
        );
        let wrong = |error| Trouble::Page(name, paths::CAP, error);
        if len != page.len() || read != page.len() {
            return Err(wrong(PageError::Length {
                expected: page.len(),
                found: len,
            }));
        }
        let page = CapPage::decode(&page).map_err(wrong)?;
        let gpu = page.gpu().ok_or(wrong(PageError::Uuid))?;
        Ok(Self {
            gpu,
            limit: page.memory_limit,
            name,
        })
    }

    /// The share's folder's name.
    #[must_use]
    pub fn name(&self) -> Name {
        self.name
    }
}

impl Name {
    fn new(name: &CStr) -> Self {
        let mut bytes = [0; NAME];
        for (place, &byte) in bytes.iter_mut().zip(name.to_bytes()).take(NAME - 1) {
            *place = byte;
        }
        Self(bytes)
    }

    fn file(&self, file: &str) -> Path {
        let mut path = Path::new();
        path.part(paths::SHARES).part("/");
        for &byte in self.0.iter().take_while(|&&byte| byte != 0) {
            path.push(byte);
        }
        path.part("/").part(file);
        path
    }

    /// Opens the share's account, having checked that it is one. Read-only it is only read.
    pub fn open_account(&self, writable: bool) -> Result<File, Trouble> {
        let trouble = |errno| Trouble::File(*self, paths::ACCOUNT, errno);
        let wrong = |error| Trouble::Page(*self, paths::ACCOUNT, error);
        let file = File::open(self.file(paths::ACCOUNT).end(), writable).map_err(trouble)?;
        let found = file.len().map_err(trouble)?;
        if found != layout::LEN {
            return Err(wrong(PageError::Length {
                expected: layout::LEN,
                found,
            }));
        }
        let mut header = [0; 64];
        file.read_at(&mut header, 0).map_err(trouble)?;
        AccountPage::check_header(&header).map_err(wrong)?;
        Ok(file)
    }

    /// Bytes that the share's processes hold together.
    pub fn used(&self) -> Result<u64, Trouble> {
        let mut used = [0; 8];
        self.open_account(false)?
            .read_at(&mut used, layout::USED)
            .map_err(|errno| Trouble::File(*self, paths::ACCOUNT, errno))?;
        Ok(u64::from_le_bytes(used))
    }
}

/// A path below [`paths::SHARES`].
struct Path {
    bytes: [u8; PATH],
    len: usize,
}

const PATH: usize = paths::SHARES.len() + NAME + 16;

impl Path {
    fn new() -> Self {
        Self {
            bytes: [0; PATH],
            len: 0,
        }
    }

    fn push(&mut self, byte: u8) {
        // The last byte stays zero.
        if self.len < PATH - 1 {
            self.bytes[self.len] = byte;
            self.len += 1;
        }
    }

    fn part(&mut self, text: &str) -> &mut Self {
        text.bytes().for_each(|byte| self.push(byte));
        self
    }

    fn end(&self) -> &CStr {
        CStr::from_bytes_until_nul(&self.bytes).unwrap_or(c"")
    }
}
