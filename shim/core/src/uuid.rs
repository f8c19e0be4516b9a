//! A GPU's UUID, as NVML prints it and as CUDA returns it.

use core::fmt;

/// The 16 bytes of a GPU's (or MIG device's) UUID, in the order in which NVML prints them and
/// `cuDeviceGetUuid` returns them.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GpuUuid(pub [u8; 16]);

/// Bytes of `GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx`.
const TEXT_LEN: usize = 40;

impl GpuUuid {
    /// Reads `GPU-…` or `MIG-…` (the new form, without a parent) as NVML prints them; `None` for
    /// any other text.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let text = text.as_bytes();
        if text.len() != TEXT_LEN || !(text.starts_with(b"GPU-") || text.starts_with(b"MIG-")) {
            return None;
        }
        let mut bytes = [0; 16];
        let mut digits = 0;
        for (at, &byte) in text[4..].iter().enumerate() {
            if matches!(at, 8 | 13 | 18 | 23) {
                if byte != b'-' {
                    return None;
                }
                continue;
            }
            let digit = match byte {
                b'0'..=b'9' => byte - b'0',
                b'a'..=b'f' => byte - b'a' + 10,
                b'A'..=b'F' => byte - b'A' + 10,
                _ => return None,
            };
            bytes[digits / 2] = bytes[digits / 2] << 4 | digit;
            digits += 1;
        }
        Some(Self(bytes))
    }
}

impl GpuUuid {
    /// As NVML prints a whole GPU, in ASCII.
    #[must_use]
    pub fn text(&self) -> [u8; TEXT_LEN] {
        const DIGITS: [u8; 16] = *b"0123456789abcdef";
        let mut text = *b"GPU-00000000-0000-0000-0000-000000000000";
        let digits = self.0.iter().flat_map(|byte| [byte >> 4, byte & 15]);
        let places = text.iter_mut().skip(4).filter(|place| **place != b'-');
        for (place, digit) in places.zip(digits) {
            *place = DIGITS[usize::from(digit)];
        }
        text
    }
}

impl fmt::Display for GpuUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(core::str::from_utf8(&self.text()).unwrap_or("GPU"))
    }
}

impl fmt::Debug for GpuUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use std::string::ToString;

    use super::GpuUuid;

    #[test]
    fn reads_what_it_prints() {
        let text = "GPU-00112233-4455-6677-8899-aabbccddeeff";
        let uuid = GpuUuid::parse(text).unwrap();
        assert_eq!(uuid.0[0], 0x00);
        assert_eq!(uuid.0[15], 0xff);
        assert_eq!(uuid.to_string(), text);
        assert_eq!(GpuUuid::parse(&text.replace("GPU", "MIG")), Some(uuid));
        assert_eq!(GpuUuid::parse(&text.replace("aabb", "AABB")), Some(uuid));
    }

    #[test]
    fn refuses_all_else() {
        for text in [
            "",
            "GPU-",
            "GPU-00112233-4455-6677-8899-aabbccddeef",
            "GPU-00112233-4455-6677-8899-aabbccddeefff",
            "GPU-00112233x4455-6677-8899-aabbccddeeff",
            "GPU-0011223-34455-6677-8899-aabbccddeeff",
            "TPU-00112233-4455-6677-8899-aabbccddeeff",
            "GPU-00112233-4455-6677-8899-aabbccddeefg",
            "MIG-GPU-00112233-4455-6677-8899-aabbccddeeff/1/0",
        ] {
            assert_eq!(GpuUuid::parse(text), None, "{text}");
        }
    }
}
