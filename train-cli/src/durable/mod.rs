//! All writing of files, so that a crash or a full disk leaves no half-written one. No other folder of this crate writes,
//! renames or removes, and none but this one makes a folder. (Two libraries write files of their own: CubeCL writes compiled
//! kernels, and rustyline the history of `chat`.)
//!
//! A file appears under its name complete or not at all: it is written under a temporary name beside it, synced and
//! renamed, and its folder is synced. A folder of files appears the same way. It ends with `manifest.json`, which is
//! written last and lists size and SHA-256 of every other file. A checkpoint that is deleted gets a temporary name first.
//!
//! | file | what it holds |
//! |---|---|
//! | `disk` | operations that need no temporary name: folders, renaming, removing |
//! | `temporary` | temporary names, and what becomes of those that a dead process left |
//! | `files` | one file: written, appended to, synced |
//! | `manifest` | the list of the files of a folder, and the check of a folder against it |
//! | `pending` | a folder of files, which takes the place of an older one |
//! | `lock` | the lock on a folder |
//! | `threads` | what is done at the same time |

mod disk;
mod files;
mod lock;
mod manifest;
mod pending;
mod temporary;
mod threads;

pub use disk::{make_folder, make_new_folder, parent, remove, remove_empty, rename};
pub use files::{append_bytes, append_line, probe, sync_file, write_bytes, write_checked, write_file};
pub use lock::{LOCK, check_unheld, is_untouched, lock};
pub(crate) use manifest::hex;
pub use manifest::{
    FileRecord, MANIFEST, digest, digest_of, is_listed_folder, lists, read_back, read_back_quickly, verify,
    verify_listed,
};
pub use pending::{PendingFolder, aside_name, finish_replacement};
pub use temporary::{is_temporary, remove_folder, remove_unless_held, sweep};
