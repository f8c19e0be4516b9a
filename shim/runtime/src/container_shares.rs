//! The container's shares: the GPUs that it may use, and its limits on each.
//!
//! Read from [`paths::SHARES`], never from the environment. If anything is not exactly as the node
//! writes it, no GPU is used, and a line on stderr says why.

use core::ffi::CStr;

use tranche_shim_core::compute::{RefillPage, refill};
use tranche_shim_core::paths;
use tranche_shim_core::{
    AccountPage, CapPage, GpuUuid, MessagePart, PageError, Priority, cap, layout,
};

use crate::complain::{Refused, refuse};
use crate::sys::{Errno, File, NotMapped};

/// One share.
#[derive(Debug)]
pub struct Share {
    /// Its GPU.
    pub gpu: GpuUuid,
    /// Bytes of device memory it may hold; `None` for a GPU without a cap.
    pub limit: Option<u64>,
    /// How many of these bytes may be memory that cannot move to the host; `None` for all.
    pub resident: Option<u64>,
    /// Percent of the GPU's time that it may use; `None` for no limit.
    pub cores: Option<u8>,
    /// Percent of the GPU's threads for each process as a client of the GPU's MPS daemon; `None` for a share without MPS.
    pub mps_threads: Option<u8>,
    /// Whose launches come first on its GPU.
    pub priority: Priority,
    /// Bytes of one context, in whole blocks; the share has room for one beside its limit.
    pub context: u64,
    /// Its folder's name.
    pub name: Name,
    /// Its cap page, which was checked.
    file: File,
}

/// The name of a share's folder, which ends with a zero.
#[derive(Clone, Copy, Debug)]
pub struct Name([u8; 256]);

/// The driver's allocation granularity, on every GPU so far: 2 MiB.
pub const BLOCK: u64 = 2 << 20;

/// The remedy for an invalid share, as the end of a message.
const REMEDY: &[MessagePart<'_>] = &[MessagePart::Text(
    "; the GPU is not used: recreate the pod, and if that does not help, see the log of \
     tranche-kubelet-plugin on its node",
)];

/// Calls `visit` with every share, in no particular order. There must be at least one.
pub fn each(visit: &mut dyn FnMut(&Share) -> Result<(), Refused>) -> Result<(), Refused> {
    let unreadable = |Errno(errno)| {
        let errno = MessagePart::Number(u64::from(errno.unsigned_abs()));
        let why = [
            MessagePart::Text(": cannot be read (errno "),
            errno,
            MessagePart::Text("): this container has no share of a GPU"),
        ];
        refuse(&[&[MessagePart::Text(paths::SHARES)], &why, REMEDY])
    };
    let mut count = 0;
    let folder =
        File::open(Path::new().part(paths::SHARES.as_bytes()).end(), false).map_err(unreadable)?;
    folder
        .names(&mut |name| {
            count += 1;
            visit(&Share::read(Name::new(name))?)
        })
        .map_err(unreadable)??;
    if count == 0 {
        let why = MessagePart::Text(": empty: this container has no share of a GPU");
        return Err(refuse(&[&[MessagePart::Text(paths::SHARES), why], REMEDY]));
    }
    Ok(())
}

/// Refuses a GPU that is visible but has no share.
pub fn refuse_gpu(gpu: GpuUuid) -> Refused {
    let text = gpu.text();
    let name = MessagePart::Text(core::str::from_utf8(&text).unwrap_or("a GPU"));
    refuse(&[
        &[
            name,
            MessagePart::Text(": visible here, but without a page in "),
            MessagePart::Text(paths::SHARES),
        ],
        REMEDY,
    ])
}

/// Refuses a concurrent share without a serving MPS daemon, or one whose client this process is not.
pub fn refuse_mps(why: &[MessagePart<'_>]) -> Refused {
    let remedy = MessagePart::Text(
        "; the GPU is not used: a daemon that ended is started again within seconds; if this does not help, see the log of tranche-mps on \
         this pod's node",
    );
    refuse(&[&[MessagePart::Text("MPS: ")], why, &[remedy]])
}

/// Refuses more shares or GPUs than the shim supports.
pub fn refuse_too_many() -> Refused {
    let most = MessagePart::Number(paths::MAX_SHARES as u64);
    refuse(&[
        &[
            MessagePart::Text(paths::SHARES),
            MessagePart::Text(": more shares or GPUs than "),
            most,
        ],
        REMEDY,
    ])
}

/// The shim's tables cannot be mapped, or the kernel cannot wipe them in a child process.
pub fn refuse_memory(why: NotMapped) -> Refused {
    match why {
        NotMapped::Map(errno) => refuse(&[
            &[
                MessagePart::Text(
                    "no address space for the tables of the GPU's share (mmap: errno ",
                ),
                number(errno),
                MessagePart::Text(")"),
            ],
            REMEDY,
        ]),
        NotMapped::Advise(errno) => refuse(&[&[
            MessagePart::Text("this kernel refuses madvise(MADV_WIPEONFORK) (errno "),
            number(errno),
            MessagePart::Text(
                "), which keeps a child process from using its parent's GPU memory; the GPU is not \
                 used: Linux has it since 4.14, gVisor does not, so run the pod with a runtime class \
                 without a sandbox",
            ),
        ]]),
    }
}

fn number(Errno(errno): Errno) -> MessagePart<'static> {
    MessagePart::Number(u64::from(errno.unsigned_abs()))
}

impl Share {
    fn read(name: Name) -> Result<Self, Refused> {
        let unreadable = |errno| name.refuse_unreadable(paths::CAP, errno);
        let wrong = |error| name.refuse_page(paths::CAP, error);
        let file = File::open(name.file(paths::CAP).end(), false).map_err(unreadable)?;
        if !file.is_on_read_only_tmpfs().map_err(unreadable)? {
            let why = MessagePart::Text("must be on a read-only mount of a tmpfs");
            return Err(name.refuse(paths::CAP, &[why]));
        }
        let mut page = [0; cap::LEN];
        let (found, read) = (
            file.size().map_err(unreadable)?,
            file.read_at(&mut page, 0).map_err(unreadable)?,
        );
        if found != page.len() || read != page.len() {
            return Err(wrong(PageError::Length {
                expected: page.len(),
                found,
            }));
        }
        let page = CapPage::decode(&page).map_err(wrong)?;
        let gpu = page.gpu().ok_or(PageError::Uuid).map_err(wrong)?;
        Ok(Self {
            gpu,
            limit: page.memory_limit,
            resident: page.resident_limit,
            cores: page.cores,
            mps_threads: page.mps_threads,
            priority: page.priority,
            context: page
                .context_memory
                .checked_next_multiple_of(BLOCK)
                .unwrap_or(page.context_memory),
            name,
            file,
        })
    }

    /// Maps the share's grant of GPU time in its cap page.
    pub fn map_refill(&self) -> Result<&'static RefillPage, Refused> {
        let mapping = self
            .file
            .map_readable(cap::LEN)
            .map_err(|why| self.name.refuse_unmapped(paths::CAP, why))?;
        // SAFETY: the mapping is of a whole cap page and is never unmapped; the refill's words lie
        // within it, aligned. The node writes them meanwhile; any content is valid for them.
        Ok(unsafe { mapping.start.byte_add(refill::OFFSET).cast().as_ref() })
    }
}

impl Name {
    fn new(name: &CStr) -> Self {
        let mut bytes = [0; 256];
        // The last stays zero.
        for (place, &byte) in bytes.iter_mut().take(255).zip(name.to_bytes()) {
            *place = byte;
        }
        Self(bytes)
    }

    fn bytes(&self) -> &[u8] {
        self.0.split(|&byte| byte == 0).next().unwrap_or(&[])
    }

    fn file(&self, file: &str) -> Path {
        let mut path = Path::new();
        path.part(paths::SHARES.as_bytes())
            .part(b"/")
            .part(self.bytes())
            .part(b"/")
            .part(file.as_bytes());
        path
    }

    fn refuse(&self, file: &str, why: &[MessagePart<'_>]) -> Refused {
        let name = core::str::from_utf8(self.bytes()).unwrap_or("?");
        let slash = MessagePart::Text("/");
        refuse(&[
            &[
                MessagePart::Text(paths::SHARES),
                slash,
                MessagePart::Text(name),
                slash,
                MessagePart::Text(file),
                MessagePart::Text(": "),
            ],
            why,
            REMEDY,
        ])
    }

    /// A file of the share cannot be opened or read.
    pub fn refuse_unreadable(&self, file: &str, errno: Errno) -> Refused {
        self.refuse(
            file,
            &[
                MessagePart::Text("cannot be read (errno "),
                number(errno),
                MessagePart::Text(")"),
            ],
        )
    }

    /// A file of the share cannot be mapped.
    pub fn refuse_unmapped(&self, file: &str, why: NotMapped) -> Refused {
        let (call, errno) = match why {
            NotMapped::Map(errno) => ("mmap", errno),
            NotMapped::Advise(errno) => ("madvise(MADV_DONTFORK)", errno),
        };
        self.refuse(
            file,
            &[
                MessagePart::Text("cannot be mapped ("),
                MessagePart::Text(call),
                MessagePart::Text(": errno "),
                number(errno),
                MessagePart::Text(")"),
            ],
        )
    }

    fn refuse_page(&self, file: &str, error: PageError) -> Refused {
        self.refuse(file, &error.parts())
    }

    /// The share's memory is oversubscribed, and the driver cannot move any of it to the host.
    pub fn refuse_immovable(&self) -> Refused {
        self.refuse(
            paths::CAP,
            &[MessagePart::Text(
                "memory is oversubscribed, but the driver cannot move it here (concurrentManagedAccess is 0)",
            )],
        )
    }

    /// Every slot of the share's account in this file belongs to a living process.
    pub fn refuse_full(&self, account: &str) -> Refused {
        let most = MessagePart::Number(layout::SLOTS as u64);
        self.refuse(
            account,
            &[most, MessagePart::Text(" processes use the share already")],
        )
    }

    /// Opens an account of the share, by its file name, and checks that it is one.
    pub fn open_account(&self, account: &str, writable: bool) -> Result<File, Refused> {
        let unreadable = |errno| self.refuse_unreadable(account, errno);
        let wrong = |error| self.refuse_page(account, error);
        let file = self.reopen_account(account, writable).map_err(unreadable)?;
        let found = file.size().map_err(unreadable)?;
        if found != layout::LEN {
            return Err(wrong(PageError::Length {
                expected: layout::LEN,
                found,
            }));
        }
        let mut header = [0; 64];
        file.read_at(&mut header, 0).map_err(unreadable)?;
        AccountPage::check_header(&header).map_err(wrong)?;
        Ok(file)
    }

    /// Opens the load page of the share's GPU; does not write a message if it fails. Another tenant may have a lease on
    /// it, which would block the open.
    pub fn open_load(&self, writable: bool) -> Result<File, Errno> {
        File::open_at_once(self.file(paths::LOAD).end(), writable)
    }

    /// Opens an account that was checked before; does not write a message if it fails.
    pub fn reopen_account(&self, account: &str, writable: bool) -> Result<File, Errno> {
        File::open(self.file(account).end(), writable)
    }
}

/// A path below [`paths::SHARES`].
struct Path {
    bytes: [u8; PATH],
    len: usize,
}

const PATH: usize = paths::SHARES.len() + 256 + 16;

impl Path {
    fn new() -> Self {
        Self {
            bytes: [0; PATH],
            len: 0,
        }
    }

    fn part(&mut self, text: &[u8]) -> &mut Self {
        for &byte in text {
            // The last byte stays zero.
            if self.len < PATH - 1 {
                self.bytes[self.len] = byte;
                self.len += 1;
            }
        }
        self
    }

    fn end(&self) -> &CStr {
        CStr::from_bytes_until_nul(&self.bytes).unwrap_or(c"")
    }
}
