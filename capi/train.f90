! Does what train.c does, with the same numbers.
!
! usage: train NET CHECKPOINTS EXPORT STEPS [RANK WORLD_SIZE HOST:PORT]
!
! Build it with the library and LibTorch beside it, as in
!   gfortran train.f90 -L$LIB -llibtorch_fsdp -Wl,--allow-shlib-undefined
module libtorch_fsdp
  use, intrinsic :: iso_c_binding
  implicit none
  integer(c_int32_t), parameter :: FSDP_AS_STORED = 0, FSDP_FLOAT32 = 1

  type, bind(C) :: fsdp_model_options
    integer(c_int32_t) :: version = 1, compute_dtype = FSDP_AS_STORED
    type(c_ptr) :: unit_types = c_null_ptr
  end type

  type, bind(C) :: fsdp_tensor
    type(c_ptr) :: data = c_null_ptr
    integer(c_int32_t) :: dtype = FSDP_FLOAT32, ndim = 2
    type(c_ptr) :: sizes = c_null_ptr
  end type

  interface
    integer(c_int) function fsdp_ranks_connect_from_environment(timeout, ranks) bind(C)
      import :: c_int, c_double, c_ptr
      real(c_double), value :: timeout
      type(c_ptr), intent(out) :: ranks
    end function
    integer(c_int) function fsdp_ranks_connect(rank, world_size, address, timeout, ranks) bind(C)
      import :: c_int, c_char, c_double, c_ptr
      integer(c_int), value :: rank, world_size
      character(kind=c_char), intent(in) :: address(*)
      real(c_double), value :: timeout
      type(c_ptr), intent(out) :: ranks
    end function
    integer(c_int) function fsdp_ranks_rank(ranks, rank) bind(C)
      import :: c_int, c_ptr
      type(c_ptr), value :: ranks
      integer(c_int), intent(out) :: rank
    end function
    integer(c_int) function fsdp_ranks_mean(ranks, x, mean) bind(C)
      import :: c_int, c_double, c_ptr
      type(c_ptr), value :: ranks
      real(c_double), value :: x
      real(c_double), intent(out) :: mean
    end function
    integer(c_int) function fsdp_model_load(ranks, path, options, model) bind(C)
      import :: c_int, c_char, c_ptr, fsdp_model_options
      type(c_ptr), value :: ranks
      character(kind=c_char), intent(in) :: path(*)
      type(fsdp_model_options), intent(in) :: options
      type(c_ptr), intent(out) :: model
    end function
    integer(c_int) function fsdp_model_use_adamw(model, rate, beta1, beta2, eps, decay) bind(C)
      import :: c_int, c_double, c_ptr
      type(c_ptr), value :: model
      real(c_double), value :: rate, beta1, beta2, eps, decay
    end function
    integer(c_int) function fsdp_model_forward(model, inputs, num_inputs) bind(C)
      import :: c_int, c_ptr, fsdp_tensor
      type(c_ptr), value :: model
      type(fsdp_tensor), intent(in) :: inputs(*)
      integer(c_int), value :: num_inputs
    end function
    integer(c_int) function fsdp_model_loss(model, loss) bind(C)
      import :: c_int, c_double, c_ptr
      type(c_ptr), value :: model
      real(c_double), intent(out) :: loss
    end function
    integer(c_int) function fsdp_model_clip_grad_norm(model, max_norm, norm) bind(C)
      import :: c_int, c_double, c_ptr
      type(c_ptr), value :: model
      real(c_double), value :: max_norm
      real(c_double), intent(out) :: norm
    end function
    integer(c_int) function fsdp_model_save(model, folder, step) bind(C)
      import :: c_int, c_int64_t, c_char, c_ptr
      type(c_ptr), value :: model
      character(kind=c_char), intent(in) :: folder(*)
      integer(c_int64_t), value :: step
    end function
    integer(c_int) function fsdp_model_resume(model, folder, step) bind(C)
      import :: c_int, c_int64_t, c_char, c_ptr
      type(c_ptr), value :: model
      character(kind=c_char), intent(in) :: folder(*)
      integer(c_int64_t), intent(out) :: step
    end function
    integer(c_int) function fsdp_model_export(model, folder) bind(C)
      import :: c_int, c_char, c_ptr
      type(c_ptr), value :: model
      character(kind=c_char), intent(in) :: folder(*)
    end function
    integer(c_int) function fsdp_model_backward(model) bind(C)
      import :: c_int, c_ptr
      type(c_ptr), value :: model
    end function
    integer(c_int) function fsdp_model_step(model) bind(C)
      import :: c_int, c_ptr
      type(c_ptr), value :: model
    end function
    integer(c_int) function fsdp_model_destroy(model) bind(C)
      import :: c_int, c_ptr
      type(c_ptr), value :: model
    end function
    integer(c_int) function fsdp_ranks_destroy(ranks) bind(C)
      import :: c_int, c_ptr
      type(c_ptr), value :: ranks
    end function
    type(c_ptr) function fsdp_last_error() bind(C)
      import :: c_ptr
    end function
    integer(c_int) function puts(text) bind(C)  ! of C's library
      import :: c_int, c_ptr
      type(c_ptr), value :: text
    end function
  end interface
end module

program train
  use libtorch_fsdp
  implicit none
  integer, parameter :: rows = 4, dim = 8
  real(c_float), target :: x(dim, rows), y(1, rows)
  integer(c_int64_t), target :: x_sizes(2) = [rows, dim], y_sizes(2) = [rows, 1]
  character(kind=c_char), target :: units(6) = ['B', 'l', 'o', 'c', 'k', c_null_char]
  type(c_ptr) :: ranks, model
  integer(c_int) :: rank
  integer(c_int64_t) :: last
  integer :: steps, step, i
  real(c_double) :: loss, norm, mean

  if (command_argument_count() == 7) then
    call check(fsdp_ranks_connect(number(5), number(6), text(7), 60.0_c_double, ranks))
  else
    call check(fsdp_ranks_connect_from_environment(60.0_c_double, ranks))
  end if
  call check(fsdp_ranks_rank(ranks, rank))
  steps = number(4)

  call check(fsdp_model_load(ranks, text(1), fsdp_model_options(unit_types=c_loc(units)), model))
  call check(fsdp_model_use_adamw(model, 0.01_c_double, 0.9_c_double, 0.999_c_double, 1e-6_c_double, 0.01_c_double))
  call check(fsdp_model_resume(model, text(2), last))

  do step = max(int(last), 0) + 1, steps
    x = reshape([(real(mod(7 * i + 5 * step + 3 * rank, 9) - 4, c_float) / 8, i = 0, rows * dim - 1)], [dim, rows])
    y = reshape([(real(mod(i + step + rank, 5) - 2, c_float) / 4, i = 0, rows - 1)], [1, rows])
    call check(fsdp_model_forward(model, [fsdp_tensor(data=c_loc(x), sizes=c_loc(x_sizes)), &
                                          fsdp_tensor(data=c_loc(y), sizes=c_loc(y_sizes))], 2))
    call check(fsdp_model_loss(model, loss))
    call check(fsdp_model_backward(model))
    call check(fsdp_model_clip_grad_norm(model, 1.0_c_double, norm))
    call check(fsdp_model_step(model))
    call check(fsdp_ranks_mean(ranks, loss, mean))
    if (rank == 0) print '("step ", i0, " loss ", f12.9)', step, mean
    if (step == steps) call check(fsdp_model_save(model, text(2), int(step, c_int64_t)))
  end do
  call check(fsdp_model_export(model, text(3)))
  call check(fsdp_model_destroy(model))
  call check(fsdp_ranks_destroy(ranks))

contains

  subroutine check(status)
    integer(c_int), intent(in) :: status
    if (status == 0) return
    if (puts(fsdp_last_error()) < 0) error stop 2
    error stop 1
  end subroutine

  ! Argument `i` as C has texts.
  function text(i)
    integer, intent(in) :: i
    character(kind=c_char, len=:), allocatable :: text
    integer :: length
    call get_command_argument(i, length=length)
    allocate(character(kind=c_char, len=length) :: text)
    call get_command_argument(i, text)
    text = text // c_null_char
  end function

  integer(c_int) function number(i)
    integer, intent(in) :: i
    character(len=32) :: digits
    call get_command_argument(i, digits)
    read (digits, *) number
  end function
end program
