//! A kernel whose CUDA C++ is given. CubeCL compiles a shell for it, which has its number of units and its shared memory;
//! then the text takes the place of the shell's.

use super::{
    form::Form,
    text::{ENTRY, text},
};
use cubecl::{
    ir::{ElemType, StorageType, UIntKind},
    prelude::*,
};
use cubecl_runtime::{
    compiler::{CompilationError, Compiler, CubeTask},
    id::KernelId,
    kernel::{CompiledKernel, CubeKernel, KernelDefinition, KernelMetadata, KernelTask},
    server::ExecutionMode,
};

/// Units of a cube: three warpgroups.
const UNITS: u32 = 384;

/// The kernel of a form.
pub(super) struct Task(pub(super) Form);

impl KernelMetadata for Task {
    fn id(&self) -> KernelId {
        KernelId::new::<Self>().cube_dim(CubeDim::new_1d(UNITS)).info(self.0.clone())
    }

    fn address_type(&self) -> StorageType {
        ElemType::UInt(UIntKind::U32).into()
    }
}

impl<Target: Compiler> CubeTask<Target> for Task {
    fn compile(
        &self,
        compiler: &mut Target,
        options: &Target::CompilationOptions,
        mode: ExecutionMode,
        address_type: StorageType,
    ) -> Result<CompiledKernel<Target>, CompilationError> {
        let shell = KernelTask::<Target, Shell>::new(Shell { shared: self.0.shared() });
        let compiled = shell.compile(compiler, options, mode, address_type)?;
        Ok(CompiledKernel { entrypoint_name: ENTRY.into(), source: text(&self.0), ..compiled })
    }
}

/// A kernel that has shared memory and does nothing with it.
struct Shell {
    shared: usize,
}

impl KernelMetadata for Shell {
    fn id(&self) -> KernelId {
        KernelId::new::<Self>().cube_dim(CubeDim::new_1d(UNITS)).info(self.shared)
    }

    fn address_type(&self) -> StorageType {
        ElemType::UInt(UIntKind::U32).into()
    }
}

impl CubeKernel for Shell {
    fn define(&self) -> KernelDefinition {
        let mut builder = KernelBuilder::default();
        AddressType::U32.register(&mut builder.scope);
        reserve::expand(&mut builder.scope, self.shared / 4);
        builder.build(KernelSettings::default().cube_dim(CubeDim::new_1d(UNITS)))
    }
}

#[cube]
fn reserve(#[comptime] words: usize) {
    let mut room = SharedMemory::<u32>::new(words);
    room[UNIT_POS as usize] = 0u32;
}
